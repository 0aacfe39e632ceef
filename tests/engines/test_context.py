"""Context parallelism: processes that share samples train as one process does, and what cannot be split is refused."""

import json

import pytest
from commands import HELPERS, ROOT, run_ranks
from torch import nn

from bigdit.catalog.context import CONTEXTS, context_misfits, context_problems
from bigdit.catalog.models import model
from bigdit.config.strategy_text import parse_strategy
from bigdit.errors import UserError
from bigdit.models import context

# fp32: a part of the heads uses other kernels, and sums have another order.
MOST = {"loss": 1e-6, "gradients": 1e-5, "curve": 1e-6, "weights": 1e-5}
# As far as one process with FP8 is from another engine. Each process has its own scales.
MOST_OF_FP8 = {"loss": 0.0, "gradients": 0.0, "curve": 1e-2, "weights": 5e-3}
PER_FAMILY = (
    *("flux", "flux2", "qwen-image", "qwen-image-edit", "wan", "wan-i2v", "ltx", "pixart", "dit"),
    *("hunyuan-1.5", "sana"),
    *("wan-begins", "ltx-begins", "hunyuan-1.5-begins"),
)
"""SD3 and CogVideoX, whose text is like HunyuanVideo 1.5's, are in benchmarks/context.py alone."""
RINGS = ("qwen-image", "hunyuan-1.5")
"""On four processes. Both have masks: one for texts that are split, one for whole texts."""
WAYS = (
    *("recomputed", "selective", "segments", "offload", "accumulated", "clipped", "hsdp", "replicas", "in_backward"),
    *("lora", "zero2", "zero3", "compiled", "tensorwise", "rowwise", "ring", "compiled ring"),
)


@pytest.fixture(scope="module")
def differences():
    """The findings of context.py, in two launches."""
    found = {}
    for count, names in ((4, RINGS), (2, PER_FAMILY)):
        done = run_ranks(count, ROOT / "tests/engines/context.py", *names, PYTHONPATH=HELPERS, DS_ACCELERATOR="cpu")
        assert done.returncode == 0, done.stderr[-3000:]
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_it_trains_as_one_process_does(differences):
    rings = (f"{name} {how}" for name in RINGS for how in ("4", "4 rings"))
    assert {*differences} == {*(f"{name} 2" for name in PER_FAMILY), *rings, *WAYS}
    wrong = {
        (name, what): value
        for name, each in differences.items()
        for what, value in each.items()
        if value > (MOST_OF_FP8 if name.endswith("wise") else MOST)[what]
    }
    assert not wrong


WAN = model("wan2.1-t2v-1.3b").spec  # 12 heads
FLUX = model("flux.1-dev").spec
SANA = model("sana-1600m").spec  # 70 heads, none of which is exchanged
LUMINA = model("lumina-image-2.0").spec


def test_what_cannot_be_split_is_refused_by_a_line():
    assert context_problems(WAN, 4) == context_problems(LUMINA, 1) == context_problems(SANA, 4) == []
    assert context_problems(WAN, 8) == context_problems(WAN, 8, 2) == context_problems(WAN, 8, 8) == []
    assert context_problems(WAN, 8, 1) == [
        "strategy.cp 8 / cp_ring 1 = 8 does not divide the 12 heads of wan2.1-t2v-1.3b; set strategy.cp_ring to 2"
    ]
    assert context_problems(SANA, 4, 2) == [
        "strategy.cp_ring is 2, and sana-1600m-1024 adds up tokens in place of attention; set it to 1"
    ]
    (problem,) = context_problems(LUMINA, 2)
    assert problem == (
        "strategy.cp is 2, and bigdit does not know how to split the tokens of Lumina2Transformer2DModel; set it to 1, "
        f"or use one of {', '.join(sorted(CONTEXTS))}"
    )
    assert context_misfits(WAN, 4, [(16, 21, 90, 160)], 511) == []  # each process has the whole text
    assert context_misfits(WAN, 4, [(16, 21, 90, 158), (16, 1, 6, 6)], 512) == [
        "strategy.cp is 4, and latents of 16 × 21 × 90 × 158 are 74,655 tokens; set it to 1, or choose another size",
        "strategy.cp is 4, and latents of 16 × 1 × 6 × 6 are 9 tokens; set it to 1, or choose another size",
    ]
    assert context_misfits(SANA, 4, [(32, 32, 30)], 300) == []
    assert context_misfits(SANA, 4, [(32, 30, 32)], 300) == [
        "strategy.cp is 4, and latents of 32 × 30 × 32 are 30 rows of tokens; set it to 2, or choose another size"
    ]
    assert context_misfits(model("cogvideox-5b").spec, 4, [(16, 13, 60, 90)], 226) == [
        "strategy.cp is 4, and latents of 16 × 13 × 60 × 90 are 17,550 tokens; set it to 2, or choose another size"
    ]
    assert context_misfits(model("sd3.5-medium").spec, 8, [(16, 128, 128)], 333) == []  # the same of one attention
    assert context_misfits(FLUX, 4, [(16, 128, 128)], 510) == [
        "strategy.cp is 4, and texts have 510 tokens; set encoders.text.max_tokens to 512, or cp to 2"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fsdp2,world_size=6,cp=4", "cp is 4, which does not divide world_size 6"),
        ("fsdp2,world_size=2,cp=4", "cp is 4, which does not divide world_size 2"),
        ("fsdp2,world_size=4,cp=2,cp_ring=4", "cp_ring is 4, which does not divide cp 2"),
        ("cp=2", "cp is 2, which does not divide world_size 1"),
        ("fsdp2,world_size=4,cp=3", "cp is 3, and 1, 2, 4 or 8 was expected"),
    ],
)
def test_a_strategy_that_contradicts_itself(text, problem):
    with pytest.raises(UserError) as found:
        parse_strategy(text.split(","))
    (line,) = found.value.problems
    assert problem in line


def test_a_global_batch_is_of_groups_of_processes():
    strategy = parse_strategy(["fsdp2", "world_size=8", "cp=4", "global_batch_size=6"])
    assert (strategy.dp, strategy.grad_accum_steps, strategy.global_batch_size) == (2, 3, 6)


def test_attention_that_processes_do_not_share_is_refused(monkeypatch):
    monkeypatch.setattr(context, "DIFFUSERS_ATTN_BACKEND", "flex")
    with pytest.raises(
        UserError, match=r"DIFFUSERS_ATTN_BACKEND is flex, and strategy.cp shares torch's own attention"
    ):
        context.split_context(nn.Module(), None, None)
