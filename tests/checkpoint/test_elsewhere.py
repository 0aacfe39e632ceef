"""A run resumes under another engine and on another number of processes, with the same state by parameter name."""

import json

import pytest
import torch
from gpus import A40
from resuming import IN_GROUPS, save, started, strategy
from safetensors.torch import load_file, save_file
from tiny_models import SANA as MODEL
from tiny_models import SHAPE
from two_processes import run_two
from whole import whole_state

from bigdit import checkpoint
from bigdit.checkpoint.folder import snapshots_of, verify
from bigdit.checkpoint.restore import layout, load_tensors
from bigdit.dist import World
from bigdit.engines.state import checkpoint_bytes
from bigdit.errors import UserError
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.strategy import OptimizerSpec

_ELSEWHERE = """
import json, sys
import torch, torch.distributed as dist
from pathlib import Path
from safetensors.torch import load_file, save_file
from resuming import IN_GROUPS, save, started, strategy
from whole import whole_state
from bigdit import checkpoint
from bigdit.dist import world_from_env
from bigdit.engines.state import checkpoint_bytes

torch.set_num_threads(1)
dist.init_process_group("gloo")
world, folder = world_from_env(), Path(sys.argv[1])
copied = json.loads((folder / "copied.json").read_text())
before = "single"
for name, wanted in {
    "zero0": strategy("deepspeed", 2, 0), "fsdp2": strategy("fsdp2", 2), "zero1": strategy("deepspeed", 2, 1),
    "zero3": strategy("deepspeed", 2, 3), "zero2": strategy("deepspeed", 2, 2),
    "zero0 in groups": strategy("deepspeed", 2, 0, optimizer=IN_GROUPS),
    "fsdp2 in groups": strategy("fsdp2", 2, optimizer=IN_GROUPS),
    "fsdp2 in fp8": strategy("fsdp2", 2, float8="tensorwise"),
    "zero1 in groups": strategy("deepspeed", 2, 1, optimizer=IN_GROUPS),
    "zero3 in groups": strategy("deepspeed", 2, 3, optimizer=IN_GROUPS),
}.items():
    found, _ = checkpoint.latest(folder / before)
    engine, ema, step, peers = started(wanted, world, seed=5, found=found)
    state, expected = whole_state(engine, ema), load_file(folder / f"{before}.safetensors")
    assert state.keys() == expected.keys(), (name, state.keys() ^ expected.keys())
    for key in state:
        assert torch.equal(state[key], expected[key]), (before, name, key)
    step()
    state = whole_state(engine, ema)
    if world.is_main:
        save_file(state, folder / f"{name}.safetensors")
        copied[name] = checkpoint_bytes(engine, ema)
    save(folder / name, engine, ema, peers)
    before = name
if world.is_main:
    (folder / "copied.json").write_text(json.dumps(copied))
dist.destroy_process_group()
"""

NAMES = ("zero0", "fsdp2", "zero1", "zero3", "zero2")
NAMES += ("zero0 in groups", "fsdp2 in groups", "fsdp2 in fp8", "zero1 in groups", "zero3 in groups")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of one process that two continue under one engine after the other, a step each; and each one's state."""
    folder = tmp_path_factory.mktemp("elsewhere")
    engine, ema, step, peers = started(strategy(), World())
    step()
    save_file(whole_state(engine, ema), folder / "single.safetensors")
    save(folder / "single", engine, ema, peers)
    (folder / "copied.json").write_text(json.dumps({"single": checkpoint_bytes(engine, ema)}))
    script = folder / "elsewhere.py"
    script.write_text(_ELSEWHERE)
    run_two(script, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_process_takes_up_what_two_had(runs, name):
    """Masters, EMA and optimizer state, to the bit. All step counts grow by one each time."""
    found, _ = checkpoint.latest(runs / name)
    engine, ema, _, _ = started(strategy(), World(), seed=5, found=found)
    state, expected = whole_state(engine, ema), load_file(runs / f"{name}.safetensors")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)
    assert {tensor.item() for key, tensor in state.items() if key.startswith("state.step.")} == {NAMES.index(name) + 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp2"])
def test_a_snapshot_has_the_emas_of_all_processes(runs, name):
    found = checkpoint.latest(runs / name)[0]
    (snapshot,) = snapshots_of(found)
    verify(snapshot)
    assert snapshot.state["updates"] == found.state["updates"] == NAMES.index(name) + 2
    expected = load_file(runs / f"{name}.safetensors")
    averages = {key: torch.empty_like(value) for key, value in expected.items() if key.startswith("ema")}
    assert {key.split(".")[0] for key in averages} == {"ema", "ema2"}
    load_tensors(snapshot, averages)
    assert all(torch.equal(value, expected[key]) for key, value in averages.items())


@pytest.mark.slow
def test_each_process_has_written_its_share(runs):
    sizes = [file.stat().st_size for file in sorted((runs / "zero3/checkpoints/step-00000001/engine").iterdir())]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.slow
def test_what_a_process_copies_to_save_is_counted_on_an_emulated_gpu(runs):
    """The first process's copy, to the byte."""
    strategies = {
        "single": strategy(),
        "zero2": strategy("deepspeed", 2, 2),
        "zero3": strategy("deepspeed", 2, 3),
        "fsdp2": strategy("fsdp2", 2),
    }
    copied = json.loads((runs / "copied.json").read_text())
    with EmulatedGpus(A40, 1) as gpus:
        for name, wanted in strategies.items():
            attempt = gpus.attempt(StepRequest(model=MODEL, batch=SHAPE, strategy=wanted), counted="step")
            assert attempt.checkpoint_bytes == copied[name], name


def test_blocks_are_other_ones_where_what_decays_lies_apart():
    """Under ZeRO, which joins a group's weights. Elsewhere each parameter has a master, whatever its group."""
    for zero in (strategy("deepspeed", 2, 2), strategy("deepspeed", 2, 3)):
        assert layout(zero) != layout(zero.model_copy(update={"optimizer": IN_GROUPS}))
    for wanted in (strategy(), strategy("fsdp2", 2)):
        assert layout(wanted) == layout(wanted.model_copy(update={"optimizer": IN_GROUPS}))


def test_state_in_blocks_stays_where_it_was_made(tmp_path):
    eight_bit = strategy(optimizer=OptimizerSpec(name="adamw_8bit_ao"), ema=None)
    engine, ema, step, peers = started(eight_bit, World())
    step()
    save(tmp_path, engine, ema, peers)
    found, _ = checkpoint.latest(tmp_path)
    elsewhere = strategy("fsdp2", 2, optimizer=OptimizerSpec(name="adamw_8bit_ao"), ema=None)
    with pytest.raises(UserError) as refused:
        checkpoint.check_resumable(found, MODEL, elsewhere)
    assert str(refused.value) == (
        f"{found.folder} holds the state of adamw_8bit_ao in blocks or factors for single, and the run is "
        f"fsdp2 on 2 processes; choose another output; there model.init_from={found.folder} starts from these weights"
    )
