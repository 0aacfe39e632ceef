"""A plan's run.yaml trains by its strategy with every launcher."""

import json
import os
import sys

import pytest
from commands import BIN, bigdit, in_process, run_command
from plan_files import SINGLE, SWAPPED, TINY_KWARGS, plan_of, run_yaml, write, zero2
from training import launched

from bigdit.catalog.names import revision
from bigdit.strategy import EmaSpec, OptimizerSpec, Strategy
from bigdit.train.loop import Ended
from bigdit.train.processes.launch import free_port
from bigdit.units import gib

PLANS = {
    "single": plan_of(
        SINGLE.model_copy(update={"optimizer": OptimizerSpec(name="adamw_8bit"), "ema": EmaSpec(device="cpu")}),
        kwargs=TINY_KWARGS,
        expandable_segments=True,
    ),
    "swapped": plan_of(SWAPPED, kwargs=TINY_KWARGS | {"num_layers": 3}),
    "deepspeed": plan_of(zero2(checkpointed_blocks="all"), kwargs=TINY_KWARGS),
    "fsdp2": plan_of(
        Strategy(engine="fsdp2", world_size=2, micro_batch_size=4, gradient_clipping=1.0, reshard_after_forward=False),
        kwargs=TINY_KWARGS,
    ),
}
# What main is asked for, in its own process, and what it sets for the allocator.
_MAIN = "import os, sys; from bigdit.train.__main__ import main; status = main(sys.argv[1:]); \
print(os.environ.get('PYTORCH_ALLOC_CONF')); sys.exit(status)"


def started(plan, config):
    """The command that runs a plan, as `bigdit plan` prints it, on a machine without GPUs."""
    if plan.strategy.engine == "deepspeed":
        options = ("--num_gpus", 2, "--master_port", free_port())
        return BIN / "deepspeed", *options, "launch/train.py", "--config", config
    if plan.strategy.engine == "fsdp2":
        return BIN / "bigdit", "train", "--config", config
    return sys.executable, "-c", _MAIN, "--config", config


def written(plan, folder, **sections):
    """The plan's run.yaml, with the output `run` beside it."""
    write(plan, folder / "plan")
    return run_yaml(folder, plan, output=str(folder / "run"), **sections)


@pytest.mark.slow
@pytest.mark.parametrize("engine", PLANS)
def test_the_receipt_has_the_plans_strategy(engine, features, tmp_path):
    plan, output = PLANS[engine], tmp_path / "run"
    config = written(plan, tmp_path, data={"features": str(features)}, train={"steps": 3, "warmup_steps": 1})
    done = run_command(*started(plan, config), DS_ACCELERATOR="cpu", PYTHONPATH=".")
    assert done.returncode == 0, done.stderr[-3000:]
    strategy = Strategy.model_validate(json.loads((output / "receipt.json").read_text())["strategy"])
    assert (strategy.optimizer.lr, strategy.optimizer.betas) == (2e-3, (0.9, 0.99))  # of the YAML
    assert strategy.model_copy(update={"optimizer": plan.strategy.optimizer}) == plan.strategy
    assert strategy.optimizer.name == plan.strategy.optimizer.name
    assert (
        done.stderr.count(f"note: the plan was made with catalogue 0123456789abcdef, and this is {revision()}") == 1
    ), done.stderr
    if engine == "single":
        assert done.stdout.splitlines()[-1] == "expandable_segments:True"


@pytest.mark.parametrize(
    ("name", "value", "printed"),
    [
        ("PYTORCH_ALLOC_CONF", "backend:native", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True", False),
    ],
)
def test_an_allocator_that_is_set_otherwise_than_planned_is_left_so_and_reported(
    name, value, printed, features, tmp_path, monkeypatch, capsys
):
    config = written(PLANS["single"], tmp_path, data={"features": str(features)})
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    seen = {}
    ended = Ended(tmp_path, 8, trained=True)
    monkeypatch.setattr("bigdit.train.loop.train", lambda *_: (seen.update(os.environ), ended)[1])
    assert launched(config, []) == 0
    assert seen[name] == value
    assert sum("ALLOC_CONF" in each for each in seen) == 1
    line = f"note: {name} is {value}, and the plan is for expandable_segments:True: without it torch may reserve more "
    assert (line in " ".join(capsys.readouterr().err.split())) is printed


def test_dry_run_shows_the_plans_strategy(tmp_path):
    plan = PLANS["deepspeed"]
    done = bigdit("train", "--config", written(plan, tmp_path), "--dry-run")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    strategy = Strategy.model_validate(found["strategy"])
    assert strategy.model_copy(update={"optimizer": plan.strategy.optimizer}) == plan.strategy
    assert done.stderr.startswith("note: the plan was made with catalogue 0123456789abcdef")
    usable = gib(plan.expected.usable_bytes)
    assert done.stderr.endswith(f", fits as planned: {gib(plan.expected.process_bytes[1])} of {usable}\n")


def errors(done):
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_other_processes_are_refused_with_both_numbers(tmp_path):
    config = written(PLANS["deepspeed"], tmp_path)
    assert errors(run_command(sys.executable, "launch/train.py", "--config", config)) == [
        f"error: {config}: strategy.world_size is 2, and 1 process runs (WORLD_SIZE); start that many, set it to 1, or "
        "leave it out"
    ]


def test_a_machine_that_has_too_little_memory_for_the_plan_starts_nothing(tmp_path):
    plan = PLANS["single"]
    too_much = plan.expected.model_copy(update={"host_bytes": 2**50})
    done = in_process("train", "--config", written(plan.model_copy(update={"expected": too_much}), tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: the plan needs 1048576.00 GiB of CPU memory (expected.host_bytes), and this machine has "
    )


def test_several_machines_need_their_options(tmp_path):
    plan = plan_of(Strategy(engine="fsdp2", world_size=16, gradient_clipping=1.0))
    done = in_process("train", "--config", written(plan, tmp_path))
    assert errors(done) == [
        "error: the plan is for 16 processes on 2 machines; on each of them add --nodes 2, --node-rank (0 to 1) and "
        "--head, the address of the first"
    ]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--head 10.0.0.1", "--node-rank and --head need --nodes, the number of machines"),
        ("--nodes 2 --head a", "--nodes 2 needs --node-rank, the number of this machine; each machine takes --nodes, "
         "--node-rank and --head"),
        ("--nodes 2 --node-rank 1", "--nodes 2 needs --head, the first one's address; each machine takes --nodes, "
         "--node-rank and --head"),
        ("--nodes 2 --node-rank 2 --head a", "--node-rank 2 should be 0 to 1 with --nodes 2"),
        ("--nodes 2 --node-rank 1 --head a:b", "--head a:b should be HOST or HOST:PORT, with a port of 1 to 65535"),
        ("--nodes 3 --node-rank 1 --head a", "strategy.world_size is 16, and --nodes 3 does not divide it"),
    ],
)  # fmt: skip
def test_wrong_options_of_machines_are_a_line(tmp_path, options, error):
    plan = plan_of(Strategy(engine="fsdp2", world_size=16, gradient_clipping=1.0))
    done = in_process("train", "--config", written(plan, tmp_path), *options.split())
    assert errors(done) == [f"error: {error}"]


def test_another_model_is_refused(tmp_path):
    plan = PLANS["single"]
    config = written(plan, tmp_path, model={"kwargs": TINY_KWARGS | {"num_layers": 3}})
    again = "set plan to null, or plan this model"
    assert errors(in_process("train", "--config", config)) == [
        f"error: model has num_layers 3, and the plan's model.kwargs.num_layers is 2 (digits); {again}"
    ]
    config = written(plan, tmp_path, model={"name": "pixart-sigma-xl-2-1024", "class_name": None, "kwargs": {}})
    assert errors(in_process("train", "--config", config, "--set", "data.buckets=[[8,8]]")) == [
        "error: model is a PixArtTransformer2DModel, and the plan's model is digits, a SanaTransformer2DModel; " + again
    ]
