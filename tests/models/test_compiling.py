"""Compiled blocks learn as others do, share their graphs, and are planned so."""

import pytest
import torch
import torch._dynamo
from commands import HELPERS, ROOT, run_ranks
from gpus import A40
from stepping import one_batch
from tiny_models import DIT, SANA, SHAPE
from torch._dynamo.utils import counters

from bigdit import engines, models
from bigdit.catalog import model
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.models.equip import compile_blocks
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.attempt import StepRequest, check, request_for
from bigdit.profile.gpus import EmulatedGpus
from bigdit.record.costs import COMPILED
from bigdit.search.ask import question_for
from bigdit.strategy import BatchShape, LoraSpec, Strategy
from bigdit.train.step import train_step

CPU = torch.device("cpu")
FOUR_BLOCKS = SANA.model_copy(update={"kwargs": SANA.kwargs | {"num_layers": 4}})
# All that stands between a model and its compiled blocks; `aot_eager` makes the graphs of Inductor, and no kernels.
AROUND = {"precision": "fp32", "checkpointed_blocks": 2, "offload_activations": True, "lora": LoraSpec(rank=2)}


def losses(strategy, spec=FOUR_BLOCKS):
    """Of three steps."""
    family = models.family(spec.class_name)
    model = models.build(spec, device="cpu", dtype=engines.compute_dtype(strategy), seed=0)
    models.equip(model, family, strategy, backend="aot_eager")
    engine = engines.create(strategy, model, family, device=CPU, world=World())
    return [float(train_step(engine, family, FlowMatchingSpec(), [one_batch(step)], lr=1e-2).loss) for step in range(3)]


@pytest.fixture
def counted():
    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    torch._dynamo.reset()


@pytest.mark.parametrize("printed", [{}, AROUND | {"precision": "bf16"}], ids=["alone", "all of it"])
def test_compiled_blocks_learn_as_others_do_and_share_their_graphs(printed, counted):
    """To the rounding of sums that are taken in another order. Of four blocks two graphs: the first is fed images
    that lie otherwise in memory than what a block gives."""
    printed = {"precision": "fp32"} | printed
    plain = losses(Strategy(**printed))
    assert counted["unique_graphs"] == 0
    assert losses(Strategy(compile_blocks=True, **printed)) == pytest.approx(plain, rel=1e-5)
    assert counted["unique_graphs"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_plan_runs_compiled_blocks():
    """With fewer kernels; the recorded step has the bytes of one that nobody watches."""
    plain, compiled = (
        StepRequest(model=DIT, batch=BatchShape(latents=(4, 8, 8)), strategy=Strategy(compile_blocks=switch))
        for switch in (False, True)
    )
    with EmulatedGpus(A40, 1) as gpus:
        one, other = (gpus.attempt(each, counted="step") for each in (plain, compiled))
        ledger = gpus.profile(compiled).ledger
    assert kernels(other) < kernels(one)
    assert COMPILED in {each.operator for each in other.work.operators}  # after a plain step of the same model too
    assert 0.9 * flops(one) < flops(other) <= flops(one)  # the smallest products are in kernels of several operators
    assert {each.phase: each.peak_bytes for each in ledger.phases} == {
        name: each.peak_bytes for name, each in other.phases.items()
    }


def kernels(attempt):
    return sum(each.launches for each in attempt.launched.values())


def flops(attempt):
    return sum(each.flops for each in attempt.work.operators)


def test_a_model_whose_blocks_are_not_compiled_on_a_gpu_is_a_line():
    """In a plan, a profile, and for a receipt."""
    request = StepRequest(model=SANA, batch=SHAPE, strategy=Strategy(compile_blocks=True))
    for ask in (
        lambda: question_for(model="sana-1600m", gpu="a40", compile=True),
        lambda: request_for(model("sana-1600m"), A40, request.strategy),
        lambda: check(request),
    ):
        with pytest.raises(UserError, match=r"\(--compile\) is set, and the compiler of torch 2\.13 hands Sana"):
            ask()


def test_a_block_that_cannot_be_compiled_is_a_line():
    done = run_ranks(1, ROOT / "tests/models/broken_compiler.py", PYTHONPATH=HELPERS)
    (line,) = done.stdout.splitlines()
    assert line.startswith("strategy.compile_blocks: torch cannot compile a block: ")
    assert "no compiler" in line
    assert line.endswith("; leave compile_blocks out")


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        (
            {"engine": "deepspeed", "ds_config": {}},
            "compile_blocks was not tried with DeepSpeed, whose hooks run within blocks; use engine single or fsdp2",
        ),
        (
            {"checkpointing": "selective", "checkpointed_blocks": 1},
            "compile_blocks makes one kernel of several operators, and checkpointing selective keeps the outputs of "
            "single ones; use checkpointing full",
        ),
        (
            {"lora": LoraSpec(base="nf4")},
            "compile_blocks was not tried with lora.base nf4; use LoRA with lora.base bf16",
        ),
        ({"lora": LoraSpec(dora=True)}, "compile_blocks was not tried with lora.dora; use LoRA with lora.base bf16"),
    ],
)
def test_what_was_not_tried_is_refused(printed, problem):
    with pytest.raises(ValueError, match="compile_blocks") as refused:
        Strategy(compile_blocks=True, **printed)
    assert problem in str(refused.value)


def test_a_compiler_that_is_switched_off_is_a_line(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    family = models.family(SANA.class_name)
    with pytest.raises(UserError, match=r"TORCHDYNAMO_DISABLE is 1; unset it, or leave compile_blocks out"):
        compile_blocks(models.skeleton(SANA, dtype=torch.float32), family)
