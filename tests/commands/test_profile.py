"""`bigdit profile`: any strategy of any config as a ledger, a plot and a snapshot; and what it refuses."""

import json
import pickle
import pickletools

import pytest
from commands import in_process
from torch.cuda import _memory_viz

from bigdit import catalog
from bigdit.config.strategy_text import parse_strategy
from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.errors import UserError
from bigdit.libraries import TESTED_WITH
from bigdit.profile.run_attempt import notices
from bigdit.strategy import BatchShape
from bigdit.units import parse_resolution

READ_BY_THE_PAGE = """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_DICT EMPTY_LIST EMPTY_TUPLE LIST DICT
    TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE
    NEWFALSE SHORT_BINUNICODE BINUNICODE
"""
"""The opcodes that torch/utils/viz/MemoryViz.js knows. It stops at any other."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A user's own diffusers config.json: Sana-600M with two blocks."""
    spec = catalog.model("sana-600m").spec
    file = tmp_path_factory.mktemp("short-sana") / "config.json"
    file.write_text(json.dumps({"_class_name": spec.class_name, **spec.kwargs, "num_layers": 2}))
    return file


@pytest.mark.slow
def test_a_user_s_model_under_zero(config, tmp_path):
    plot, snapshot = tmp_path / "peak.png", tmp_path / "new" / "out.pickle"
    options = ("--model", config, "--strategy", "zero2,world_size=64", "--resolution", "512x256", "--gpu", "rtx-3090")
    done = in_process("profile", *options, "--plot", plot, "--snapshot", snapshot)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert " on an emulated NVIDIA GeForce RTX 3090:" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")

    found = json.loads(in_process("profile", *options, "--json").stdout)  # from the cache
    assert found["batch"] == BatchShape(latents=(32, 16, 8), text=(300, 2304)).model_dump(mode="json")
    assert (found["emulated"], found["fits"]) == (cuda_build(cuda_python()), True)
    for phase in found["ledger"]["phases"]:
        assert sum(phase["at_peak"].values()) == phase["peak_bytes"]
    assert [phase["phase"] for phase in found["ledger"]["phases"]] == ["init", "forward", "backward", "step"]
    assert found["ledger"]["peak_allocated_bytes"] <= found["peak_reserved_bytes"] < found["process"]["low_bytes"]
    sent = {(each["phase"], each["name"], each["group_size"]) for each in found["collectives"]}
    assert ("backward", "reduce", 64) in sent or ("backward", "all_reduce", 64) in sent
    assert ("step", "all_gather", 64) in sent
    assert sum(each["flops"] for each in found["operators"] if each["phase"] == "forward") > 0
    check_snapshot(snapshot, found)


def check_snapshot(file, found):
    """torch's page can read it, its reports accept it, and every allocation has a label, category and stack."""
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    used = list(pickletools.genops(file.read_bytes()))
    assert {opcode.name for opcode, _, _ in used} <= set(READ_BY_THE_PAGE.split())
    assert max(value for opcode, value, _ in used if opcode.name == "LONG1") < 2**53  # a JavaScript number
    snapshot = pickle.loads(file.read_bytes())
    assert "total_reserved" in _memory_viz.segsum(snapshot)
    (trace,) = (trace for trace in snapshot["device_traces"] if trace)
    allocations = [entry for entry in trace if entry["action"] == "alloc"]
    named = {category for phase in found["ledger"]["phases"] for category in phase["at_peak"]}
    assert named <= {entry["category"] for entry in allocations}
    assert all(entry["frames"][0]["filename"] == entry["category"] for entry in allocations)
    assert {entry["category"] for entry in trace} - named >= {"unknown"}
    of_block = [entry for entry in allocations if entry["frames"][0]["name"].endswith("transformer_blocks.0")]
    assert any(frame["filename"].endswith("sana_transformer.py") for entry in of_block for frame in entry["frames"])


@pytest.mark.slow
def test_what_does_not_fit_ends_with_2_and_its_figures_are_whole(config):
    options = ("--model", config, "--gpu", "rtx-4060", "--strategy", "single,micro_batch_size=64")
    done = in_process("profile", *options)
    assert done.returncode == 2, done.stderr
    assert done.stdout.endswith("does not fit\n")
    left = next(line for line in done.stdout.splitlines() if line.startswith("left"))
    assert left.count("-") == 2


def test_files_that_cannot_be_written_are_named_before_anything_runs(config, tmp_path):
    (tmp_path / "file").write_text("")
    for option in ("--plot", "--snapshot"):
        done = in_process("profile", "--model", config, option, tmp_path / "file" / "out")
        assert done.returncode == 1
        assert done.stderr == f"error: {option}: cannot write {tmp_path / 'file'}: Not a directory; choose another\n"


def test_a_strategy_is_presets_keys_and_files(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("checkpointed_blocks: all\nema: {device: cpu}\n")
    strategy = parse_strategy([f"zero3-offload,world_size=8,{file}", "optimizer.name=came", "micro_batch_size=4"])
    assert (strategy.engine, strategy.zero_stage, strategy.world_size) == ("deepspeed", 3, 8)
    assert strategy.ds_config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert strategy.ds_document["train_micro_batch_size_per_gpu"] == 4
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
        (
            "zero3,world_size=2,checkpointing=selective,checkpointed_blocks=all",
            "checkpointing selective keeps matrix products, which ZeRO-3 changes in place: gradients would be wrong",
        ),
        ("zero2,dp_replicate=2", "dp_replicate and cpu_offload belong to the engine fsdp2"),
        ("zero2,precision=bf16_sr", "precision bf16_sr has no master weights"),
        ("single,precision=bf16_sr,optimizer.name=lion_8bit", "needs stochastic rounding; use optimizer.name adamw"),
        ("single,optimizer_in_backward=true", "set gradient_clipping to null"),
        ("single,optimizer_in_backward=true,grad_accum_steps=2,gradient_clipping=null", "set it to 1"),
        ("zero1,lora={base: nf4}", "use lora.base bf16, or engine single"),
        ("single,encode_chunk=2", "encode_chunk belongs to features online"),
        ("missing.yaml", "the file does not exist"),
        ("single,ema.device=[", "the value is not YAML"),
        ("single,micro_batch_size=1000000", "--strategy: micro_batch_size is 1000000, and 4096 or less was expected"),
        ("single,lora.rank=100000", "--strategy: lora.rank is 100000, and 8192 or less was expected"),
        ("zero2,world_size=99999999", "--strategy: world_size is 99999999, and 4096 or less was expected"),
        (
            "single,micro_batch_size=2,micro_batch_size=4",
            "--strategy has micro_batch_size=2 and micro_batch_size=4; leave one of them out",
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


def test_untested_versions_and_lost_factors_are_logged():
    tested = {name: first for name, (first, _) in TESTED_WITH.items()}
    assert notices(parse_strategy(["single"]), tested) == []
    (version,) = notices(parse_strategy(["single"]), tested | {"torch": "2.16.0+cu132"})
    assert version.startswith("torch 2.16.0+cu132 is outside the versions that bigdit was tested with (2.11.0 to ")
    (factored,) = notices(parse_strategy(["zero2,world_size=2,optimizer.name=came"]), tested)
    assert "flat partitions, which cannot be factored" in factored
