"""A plan's commands are right for its engine, GPUs and machines, by their launchers' own parsers."""

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import plans
import pytest
import yaml
from commands import ROOT
from hypothesis import given
from hypothesis import strategies as st

from bigdit.catalog import model
from bigdit.processes import entry
from bigdit.report.how_to_run import PORT, SAVED_BYTES_PER_S, Command, commands, obstacle, skeleton
from bigdit.speed.seconds import Cluster
from bigdit.strategy import Strategy

FOLDER = Path("plans/a folder")


@pytest.fixture(scope="module")
def made():
    return plans.made_plan()


def printed(plan, folder=Path("plans/x")):
    return [" ".join(command.words) for command in commands(plan, folder)]


BY_PLAN = "--config plans/x/run.yaml"
EXTRACT = "bigdit extract --config plans/x/run.yaml"
SHORT = "bigdit train --config plans/x/run.yaml"


def test_the_script_is_found_from_where_a_plan_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = entry()
    assert Path(script).is_file()
    monkeypatch.chdir(ROOT)
    assert entry() == ("launch/train.py",)


def on(made, strategy, gpus_per_node=8):
    cluster = Cluster(gpus=strategy.world_size, gpus_per_node=gpus_per_node)
    request = made.request.model_copy(update={"cluster": cluster})
    chosen = made.chosen.model_copy(update={"strategy": strategy})
    return made.model_copy(update={"request": request, "chosen": chosen})


def fsdp2(world):
    return Strategy(engine="fsdp2", world_size=world, gradient_clipping=1.0)


def node(nodes, processes, rank):
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {processes} --node-rank {rank} --master-addr $HEAD "
        f"--master-port {PORT} --rdzv-conf timeout=240 launch/train.py {BY_PLAN}"
    )


def on_each(nodes):
    return f"{SHORT} --nodes {nodes} --node-rank $NODE_RANK --head $HEAD"


def by_accelerate(kind, processes):
    return f"accelerate launch {kind} --num_machines 1 --num_processes {processes} launch/train.py {BY_PLAN}"


def sbatch(nodes, processes, *more):
    asked = f"sbatch --nodes {nodes} --ntasks-per-node {processes} --gpus-per-node {processes} --time 24:00:00"
    return " ".join([asked, *more, "launch/slurm/train.sbatch plans/x/run.yaml"])


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_commands_are_those_of_the_engine_and_the_machines(made):
    deepspeed = f"launch/train.py {BY_PLAN}"
    zero2 = plans.sharded_plan(8)
    assert printed(made) == [EXTRACT, SHORT, f"python launch/train.py {BY_PLAN}", sbatch(1, 1)]
    assert printed(zero2) == [
        *(EXTRACT, SHORT, f"deepspeed --num_gpus 8 {deepspeed}"),
        by_accelerate("--use_deepspeed", 8),
        sbatch(1, 8),
    ]
    assert printed(plans.sharded_plan(32)) == [
        *(EXTRACT, on_each(4), f"deepspeed --hostfile hostfile {deepspeed}"),
        sbatch(4, 8),
    ]
    comments = [command.comment for command in commands(plans.sharded_plan(32), Path("plans/x"))]
    assert comments[1:3] == [
        "on each of 4 machines: NODE_RANK 0 to 3, HEAD the address of the first; the same command resumes",
        "or on the first machine, with 4 lines `host slots=8` in hostfile",
    ]
    assert printed(on(made, fsdp2(8))) == [
        EXTRACT,
        SHORT,
        f"torchrun --standalone --nproc-per-node 8 launch/train.py {BY_PLAN}",
        by_accelerate("--multi_gpu", 8),
        sbatch(1, 8),
    ]
    assert printed(on(made, fsdp2(12))) == [
        *(EXTRACT, on_each(2), node(2, 6, "$NODE_RANK")),
        sbatch(2, 6),
    ]


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_a_slurm_job_has_the_time_of_the_run_and_of_a_save(made):
    """1,000 steps at their slowest. The warning before the end leaves time to save 100 GB. Slow steps save often."""
    step = made.chosen.step.seconds.high
    short = made.run.model_copy(update={"steps": 1000})
    plan = made.model_copy(update={"run": short, "host": made.host.model_copy(update={"checkpoint_bytes": 0})})
    assert f"--time {math.ceil(1000 * step / 3600)}:00:00 launch" in printed(plan)[-1]
    slow = plan.model_copy(update={"host": made.host.model_copy(update={"checkpoint_bytes": 100 * 10**9})})
    grace = math.ceil(step + 100e9 / SAVED_BYTES_PER_S)
    assert f"--signal USR1@{grace + 60} --export ALL,GRACE={grace} launch" in printed(slow)[-1]
    assert [yaml.safe_load(skeleton(each))["train"]["checkpoint_every"] for each in (plan, slow)] == [40, 100]


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_launchers_read_the_commands_as_they_are_meant(made):
    """torchrun's, accelerate's and DeepSpeed's own parsers, for every form of command."""
    lines = [
        "\n".join(command.lines())
        for plan in (on(made, fsdp2(8)), on(made, fsdp2(12)), plans.sharded_plan(8), plans.sharded_plan(32))
        for command in commands(plan, FOLDER)
        if command.words[0] not in ("bigdit", "sbatch")
    ]
    parse = """
import json, shlex, sys
from accelerate.commands.launch import launch_command_parser
from deepspeed.launcher import runner
from torch.distributed.run import get_args_parser
found = []
for line in json.load(sys.stdin):
    name, *words = shlex.split(line.replace("\\\\\\n", " ").replace("$NODE_RANK", "1"))
    if name == "torchrun":
        parsed = get_args_parser().parse_args(words)
        found.append([parsed.nnodes, parsed.nproc_per_node, parsed.node_rank, parsed.training_script,
                      parsed.training_script_args])
    elif name == "accelerate":
        parsed = launch_command_parser().parse_args(words[1:])
        found.append([parsed.num_machines, parsed.num_processes, parsed.machine_rank, parsed.use_deepspeed,
                      parsed.training_script, parsed.training_script_args])
    else:
        parsed = runner.parse_args(words)
        found.append([parsed.hostfile, parsed.num_gpus, 0, parsed.user_script, parsed.user_args])
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", parse], input=json.dumps(lines), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    by_plan = ["--config", str(FOLDER / "run.yaml")]
    assert json.loads(done.stdout.splitlines()[-1]) == [
        ["1:1", "8", 0, "launch/train.py", by_plan],
        [1, 8, None, False, "launch/train.py", by_plan],
        ["2", "6", 1, "launch/train.py", by_plan],
        ["/job/hostfile", 8, 0, "launch/train.py", by_plan],
        [1, 8, None, True, "launch/train.py", by_plan],
        ["hostfile", -1, 0, "launch/train.py", by_plan],
    ]


@given(st.lists(st.text(st.characters(codec="ascii", categories=["L", "N", "Zs"]), min_size=1), min_size=1))
def test_a_shell_reads_a_command_as_its_words(arguments):
    command = Command("", ("torchrun", "--standalone", "--nnodes", "2", *arguments))
    lines = command.lines(40)
    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == list(command.words)
    assert all(line.endswith(" \\") for line in lines[:-1])


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_what_cannot_be_trained_here_has_no_command(made):
    plan = online(made)
    assert obstacle(plan) is None
    first = model("wan2.1-i2v-14b-480p")
    plan = plan.model_copy(update={"request": plan.request.model_copy(update={"model": first})})
    assert obstacle(plan) == "strategy.features online cannot give the first frame that the model needs"
    assert "nothing to run: strategy.features online cannot give" in plans.shown(plan, Path("plans/x"))
    assert obstacle(made) is None


def online(made):
    """The plan with its encoders on the GPU."""
    strategy = made.chosen.strategy.model_copy(update={"features": "online"})
    return made.model_copy(update={"chosen": made.chosen.model_copy(update={"strategy": strategy})})


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_features_online_are_not_extracted(made):
    """The run has one bucket, and its encoders have the planned dtypes."""
    plan = online(made)
    assert next(each.words[:2] for each in commands(made, FOLDER)) == ("bigdit", "extract")
    assert next(each.words[:2] for each in commands(plan, FOLDER)) == ("bigdit", "train")
    run = yaml.safe_load(skeleton(plan))
    assert (run["strategy"]["features"], run["data"]["buckets"]) == ("online", [[1024, 1024]])
    assert "features" not in run["data"]
    assert "dtype" not in run["encoders"]["image"]
    assert run["encoders"]["text"]["dtype"] == "bf16"
