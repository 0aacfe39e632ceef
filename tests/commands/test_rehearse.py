"""`bigdit rehearse`: any strategy of any config, as a ledger, a picture and a snapshot; and what it refuses."""

import json

import pytest
from commands import HELPERS, bigdit, run_ranks
from rehearsing import THREE_BLOCKS as TINY

from bigdit.config.strategy import parse_strategy
from bigdit.errors import UserError
from bigdit.profile.request import parse_resolution
from bigdit.profile.notices import PROVED_WITH, notices


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A user's own diffusers config.json: a small Sana."""
    file = tmp_path_factory.mktemp("tiny-sana") / "config.json"
    kwargs = TINY.kwargs | {"in_channels": 32, "out_channels": 32}
    file.write_text(json.dumps({"_class_name": TINY.class_name, "_diffusers_version": "0.42.1", **kwargs}))
    return file


@pytest.mark.slow
def test_a_user_s_model_under_zero(config, tmp_path):
    plot, snapshot = tmp_path / "peak.png", tmp_path / "out.pickle"
    question = ("--model", config, "--strategy", "zero2,world_size=64", "--resolution", "512x256", "--gpu", "rtx-3090")
    cache = {"BIGDIT_CACHE": str(tmp_path / "cache")}
    done = bigdit("rehearse", *question, "--plot", plot, "--snapshot", snapshot, **cache)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in ("ZeRO-2 on 64 processes", "by phase", "live at the peak", "expandable", "as nvidia-smi shows it"):
        assert words in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert snapshot.stat().st_size > 1000

    again = bigdit("rehearse", *question, "--json", **cache)  # from the cache
    found = json.loads(again.stdout)
    assert found["batch"] == {"latents": [32, 16, 8], "latents_dtype": "fp32", "text": [300, 12]}
    for phase in found["ledger"]["phases"]:
        assert sum(phase["at_peak"].values()) == phase["peak_bytes"]
    assert [phase["phase"] for phase in found["ledger"]["phases"]] == ["init", "forward", "backward", "step"]
    sent = {(each["phase"], each["name"], each["group_size"]) for each in found["collectives"]}
    assert ("backward", "reduce", 64) in sent or ("backward", "all_reduce", 64) in sent
    assert ("step", "all_gather", 64) in sent
    assert sum(each["flops"] for each in found["operators"] if each["phase"] == "forward") > 0


@pytest.mark.slow
def test_what_does_not_fit_says_where_it_ran_out(tmp_path):
    """One wide block: quick to rehearse, and too much for a card of 8 GB with AdamW."""
    file = tmp_path / "config.json"
    wide = {"num_attention_heads": 64, "attention_head_dim": 64, "num_layers": 2, "caption_channels": 12}
    wide |= {"num_cross_attention_heads": 64, "cross_attention_head_dim": 64, "cross_attention_dim": 4096}
    kwargs = TINY.kwargs | {"in_channels": 32, "out_channels": 32} | wide
    file.write_text(json.dumps({"_class_name": TINY.class_name, **kwargs}))
    done = bigdit("rehearse", "--model", file, "--gpu", "rtx-4060", "--resolution", "512")
    assert done.returncode == 2, done.stderr
    assert "run out in" in done.stdout
    assert "does not fit" in done.stdout


def test_a_strategy_is_presets_keys_and_files(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("checkpointed_blocks: all\nema: {device: cpu}\n")
    strategy = parse_strategy([f"zero3-offload,world_size=8,{file}", "optimizer.name=came", "micro_batch_size=4"])
    assert (strategy.engine, strategy.zero_stage, strategy.world_size) == ("deepspeed", 3, 8)
    assert strategy.ds_config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert strategy.ds_config["train_micro_batch_size_per_gpu"] == 4
    assert (strategy.optimizer.name, strategy.checkpointed_blocks, strategy.ema.device) == ("came", "all", "cpu")
    assert parse_strategy(["fsdp2,world_size=8,dp_replicate=2"]).dp_shard == 4
    assert parse_strategy(["single,lora={rank: 4, targets: [to_q, to_v]}"]).lora.targets == ("to_q", "to_v")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zero4", "neither key=value, a YAML file nor a preset; did you mean zero"),
        ("single,micro_batch=2", "unknown key; did you mean micro_batch_size"),
        ("fsdp2,world_size=2,optimizer.name=adamw_8bit", "cannot step FSDP2's sharded DTensors; use"),
        ("zero3,world_size=2,optimizer_in_backward=true,gradient_clipping=null", "ZeRO-3 partitions gradients"),
        ("single,world_size=2", "engine single runs one process, and world_size is 2"),
        ("fsdp2,world_size=6,dp_replicate=4", "dp_replicate is 4, which does not divide world_size 6"),
        ("zero2,dp_replicate=2", "dp_replicate and cpu_offload belong to the engine fsdp2"),
        ("zero2,precision=bf16_sr", "precision bf16_sr has no master weights"),
        ("single,precision=bf16_sr,optimizer.name=lion_8bit", "needs stochastic rounding; use optimizer.name adamw"),
        ("single,optimizer_in_backward=true", "set gradient_clipping to null"),
        ("single,optimizer_in_backward=true,grad_accum_steps=2,gradient_clipping=null", "set it to 1"),
        ("zero1,lora={base: nf4}", "use lora.base bf16, or engine single"),
        ("single,encode_chunk=2", "encode_chunk belongs to features online"),
        ("missing.yaml", "the file does not exist"),
        ("single,ema.device=[", "the value is not YAML"),
        ("single,micro_batch_size=1000000", "--strategy: micro_batch_size is 1000000, and 1024 or less was expected"),
        ("single,lora.rank=100000", "--strategy: lora.rank is 100000, and 8192 or less was expected"),
        ("zero2,world_size=99999999", "--strategy: world_size is 99999999, and 4096 or less was expected"),
        (
            "single,micro_batch_size=2,micro_batch_size=4",
            "--strategy says micro_batch_size=2 and micro_batch_size=4; leave one of them out",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(text, words):
    with pytest.raises(UserError) as error:
        parse_strategy([text])
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["0", "1024x", "big"])
def test_resolutions_are_pixels(text):
    with pytest.raises(UserError, match="expects pixels such as 1024 or 480x832"):
        parse_resolution(text)
    assert parse_resolution("480x832") == (480, 832)


def test_untested_versions_and_lost_factors_are_said_aloud():
    proved = {name: first for name, (first, _) in PROVED_WITH.items()}
    assert notices(parse_strategy(["single"]), proved) == ()
    (version,) = notices(parse_strategy(["single"]), proved | {"torch": "2.16.0+cu132"})
    assert version.startswith("torch 2.16.0+cu132 is outside the versions that rehearsals were proved with")
    (factored,) = notices(parse_strategy(["zero2,world_size=2,optimizer.name=came"]), proved)
    assert "flat partitions, which cannot be factored" in factored


# A forward pass that reads its data, in a process of its own as every rehearsal is.
_READS = """
import os, sys
import torch
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock as Block
from rehearsing import SHAPE, THREE_BLOCKS
from bigdit.errors import guard
from bigdit.rehearse import StepRequest
from bigdit.rehearse.worker import rehearse_size
from bigdit.spec import Strategy
forward = Block.forward
def reading(block, hidden_states, *args, **kwargs):
    if sys.argv[1] == "item":
        hidden_states.abs().max().item()
    elif sys.argv[1] == "one_hot":
        torch.nn.functional.one_hot(hidden_states.abs().long())
    else:
        hidden_states[hidden_states > 0]
    return forward(block, hidden_states, *args, **kwargs)
Block.forward = reading
request = StepRequest(model=THREE_BLOCKS, batch=SHAPE, strategy=Strategy(), micro_batch_sizes=(1,))
status = guard(lambda: rehearse_size(request, 1) and 0)
sys.stderr.flush()
os._exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "operator"),
    [("item", "aten._local_scalar_dense"), ("one_hot", "aten._local_scalar_dense"), ("mask", "aten.nonzero")],
)
def test_a_model_that_reads_data_is_named(how, operator, tmp_path):
    script = tmp_path / "reads.py"
    script.write_text(_READS)
    done = run_ranks(1, script, how, PYTHONPATH=HELPERS)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {TINY.name} cannot be rehearsed: transformer_blocks.0 reads data with {operator}")
    assert "take that number from shapes, or hand it in as an argument" in last
