"""Two machines train by the commands that `bigdit plan` prints, and take one process's steps.

Both machines are this one. For torchrun and accelerate they are two groups of processes that meet at an address. For
DeepSpeed they are two lines of a hostfile, with stubs of ssh and pdsh, which this machine lacks.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from string import Template

import plans
import pytest
from commands import BIN, ROOT
from plan_files import TINY_KWARGS, plan_of, run_yaml, write
from running import until
from training import launched

from bigdit.config.strategy_text import parse_strategy
from bigdit.report.how_to_run import PORT, Command, commands
from bigdit.speed.seconds import Cluster
from bigdit.strategy import Strategy
from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.processes.launch import free_port

pytestmark = pytest.mark.slow

STEPS = 4
GLOBAL_BATCH = 8
# Sums of a step's gradients have another order, here after four steps: see test_curves.py.
TOLERANCE = 2e-5

_SSH = "#!/bin/sh\necho 127.0.0.1\n"
# Run the command for each host on this machine, as pdsh does in each one's shell. `%n` is the host's number.
_PDSH = f"""#!{BIN / "python"}
import os, shlex, subprocess, sys
words = sys.argv[1:]
hosts = words[words.index("-w") + 1].split(",")
*before, command = " ".join(words[words.index("-w") + 2 :]).split(";")
for words in map(shlex.split, before):
    if words[0] == "export":
        os.environ.update([words[1].split("=", 1)])
    elif words[0] == "cd":
        os.chdir(words[1])
    else:
        sys.exit(f"what is {{words}}?")
runs = [subprocess.Popen(shlex.split(command.replace("%n", str(place)))) for place in range(len(hosts))]
sys.exit(max(run.wait() for run in runs))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment's programs come first in PATH, and before them the stubs that reach another machine."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in (("ssh", _SSH), ("pdsh", _PDSH)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    path = f"{stubs}:{BIN}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def planned(strategy: Strategy, features: Path, folder: Path, steps: int = STEPS, gpus_per_node: int = 8) -> Path:
    """A plan's folder with a completed run.yaml, whose output is `run` there."""
    folder.mkdir()
    plan = plan_of(strategy, kwargs=TINY_KWARGS)
    plan = plan.model_copy(update={"request": plan.request.model_copy(update={"gpus_per_node": gpus_per_node})})
    write(plan, folder)
    train = {"steps": steps, "warmup_steps": 1}
    data, output = {"features": str(features)}, str(folder / "run")
    run_yaml(folder, plan, data=data, train=train, output=output, plan="plan.yaml")
    return folder


def printed(launcher: str, strategy: Strategy, processes_per_node: int, folder: Path) -> Command:
    """A launcher's command in a plan of `strategy`."""
    plan = plans.made_plan()
    cluster = Cluster(gpus=strategy.world_size, gpus_per_node=processes_per_node)
    request = plan.request.model_copy(update={"cluster": cluster})
    chosen = plan.chosen.model_copy(update={"strategy": strategy})
    found = commands(plan.model_copy(update={"request": request, "chosen": chosen}), folder)
    *_, command = [command for command in found if command.words[0] == launcher]
    return command


def on_two_machines(command: Command, environment: dict[str, str]) -> None:
    """Run it on each machine; they differ by NODE_RANK."""
    port = str(free_port())
    words = [port if word == str(PORT) else word for word in command.words]
    machines = []
    for rank in range(2):
        head = f"127.0.0.1:{port}" if words[0] == "bigdit" else "127.0.0.1"
        line = Template(" ".join(words)).substitute(NODE_RANK=rank, HEAD=head)
        machines.append(
            subprocess.Popen(shlex.split(line), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        )
    printed = [machine.communicate(timeout=300)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], printed


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(output / "metrics.jsonl")]


@pytest.fixture(scope="module")
def reference(features: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    strategy = Strategy(precision="fp32", micro_batch_size=GLOBAL_BATCH, gradient_clipping=1.0)
    folder = planned(strategy, features, tmp_path_factory.mktemp("one") / "plan")
    assert launched(folder / "run.yaml", []) == 0
    found = losses(folder / "run")
    assert len(found) == STEPS
    return found


def holds(folder: Path, strategy: Strategy, reference: list[float]) -> None:
    """Check that the run has the plan's strategy and one process's losses."""
    ran = Strategy.model_validate(json.loads((folder / "run/receipt.json").read_text())["strategy"])
    assert ran.model_copy(update={"optimizer": strategy.optimizer}) == strategy
    assert losses(folder / "run") == pytest.approx(reference, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("launcher", "comment"),
    [
        ("bigdit", "on each of 2 machines: NODE_RANK 0 to 1, HEAD the address of the first; the same command resumes"),
        ("torchrun", "or on each by torchrun"),
    ],
)
def test_two_copies_of_the_model_on_two_machines(features, tmp_path, environment, reference, launcher, comment):
    """HSDP: sharded within a machine, averaged between machines."""
    strategy = parse_strategy(["fsdp2,world_size=4,dp_replicate=2,micro_batch_size=2,precision=fp32"])
    folder = planned(strategy, features, tmp_path / "plan")
    command = printed(launcher, strategy, 2, folder)
    assert command.comment == comment
    on_two_machines(command, environment)
    holds(folder, strategy, reference)


def test_a_signal_to_one_machine_saves_the_run_and_ends_it_on_all(features, tmp_path, environment):
    strategy = parse_strategy(["fsdp2,world_size=2,micro_batch_size=4,precision=fp32"])
    folder = planned(strategy, features, tmp_path / "plan", steps=2000)
    where = f"bigdit train --config {folder}/run.yaml --nodes 2 --head 127.0.0.1:{free_port()} --node-rank"
    machines = [
        subprocess.Popen([*where.split(), str(rank)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    rows = folder / "run/metrics.jsonl"
    until(lambda: rows.exists() and rows.read_text(), 120)
    machines[1].send_signal(signal.SIGTERM)
    first, _ = [machine.communicate(timeout=120)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [128 + signal.SIGTERM] * 2, first
    assert "SIGTERM: saved" in first


def test_each_machine_names_the_lost_rank_alone(features, tmp_path, environment):
    """Rank 0 held the store: the others do not take those who end because of it for lost."""
    strategy = parse_strategy(["fsdp2,world_size=4,micro_batch_size=2,precision=fp32"])
    folder = planned(strategy, features, tmp_path / "plan", steps=100_000, gpus_per_node=2)
    where = f"bigdit train --config {folder}/run.yaml --nodes 2 --head 127.0.0.1:{free_port()} --node-rank"
    machines = [
        subprocess.Popen([*where.split(), str(rank)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    rows = folder / "run/metrics.jsonl"
    until(lambda: rows.exists() and rows.read_text(), 120)
    holder = json.loads((folder / "run/lock").read_text())["pid"]
    os.kill(holder, signal.SIGKILL)
    printed = [machine.communicate(timeout=120)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [128 + signal.SIGKILL, 1]
    lines = [[line for line in each.splitlines() if line.startswith("error: ")] for each in printed]
    assert [len(each) for each in lines] == [1, 1], printed
    assert all(line.startswith(f"error: rank 0 (process {holder} on ") for (line,) in lines)
    assert all(" was lost after step " in line for (line,) in lines)


def test_one_of_two_machines_goes_on_alone(features, tmp_path, environment, reference):
    """With as many processes as planned for a machine, and the same batch."""
    strategy = parse_strategy(["fsdp2,world_size=4,micro_batch_size=2,precision=fp32"])
    folder = planned(strategy, features, tmp_path / "plan", gpus_per_node=2)
    done = subprocess.run(
        ["bigdit", "train", "--config", folder / "run.yaml", "--nodes", "1"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran = json.loads((folder / "run/receipt.json").read_text())["strategy"]
    assert (ran["world_size"], ran["micro_batch_size"] * ran["grad_accum_steps"]) == (2, GLOBAL_BATCH // 2)
    assert losses(folder / "run") == pytest.approx(reference, rel=TOLERANCE)


def test_two_machines_by_accelerate(features, tmp_path, environment, reference):
    strategy = parse_strategy(["zero3,world_size=2,micro_batch_size=4,precision=fp32"])
    folder = planned(strategy, features, tmp_path / "plan")
    where = f"--machine_rank $NODE_RANK --main_process_ip $HEAD --main_process_port {PORT} --rdzv_conf timeout=240"
    kind = "--use_deepspeed --deepspeed_multinode_launcher standard --num_machines 2 --num_processes 2"
    words = f"accelerate launch {kind} {where} launch/train.py --config {folder}/run.yaml"
    command = Command("as docs/gpus.md has it", tuple(words.split()))
    on_two_machines(command, environment)
    holds(folder, strategy, reference)


@pytest.fixture
def hostfile(tmp_path):
    file = tmp_path / "hostfile"
    file.write_text("one slots=1\nother slots=1\n")
    return file


def on_the_first(words: list[str], environment: dict[str, str]) -> None:
    """Run a command that starts both machines."""
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


ZERO2 = "zero2,world_size=2,micro_batch_size=4,precision=fp32"


def test_zero2_on_two_machines_of_a_hostfile(features, tmp_path, environment, reference, hostfile):
    strategy = parse_strategy([ZERO2])
    folder = planned(strategy, features, tmp_path / "plan")
    command = printed("deepspeed", strategy, 1, folder)
    assert command.comment == "or on the first machine, with 2 lines `host slots=1` in hostfile"
    words = ["deepspeed", "--master_port", str(free_port()), *command.words[1:]]
    on_the_first([str(hostfile) if word == "hostfile" else word for word in words], environment)
    holds(folder, strategy, reference)


def test_accelerate_hands_a_hostfile_over_to_deepspeed(features, tmp_path, environment, reference, hostfile):
    """With its options in a file that `deepspeed` reads."""
    strategy = parse_strategy([ZERO2])
    folder = planned(strategy, features, tmp_path / "plan")
    asked = f"--use_deepspeed --zero_stage 2 --num_machines 2 --num_processes 2 --deepspeed_hostfile {hostfile}"
    where = f"--machine_rank 0 --main_process_ip 127.0.0.1 --main_process_port {free_port()}"
    run = f"launch/train.py --config {folder}/run.yaml"
    left = tmp_path / "deepspeed_env"
    on_the_first(f"accelerate launch {asked} {where} {run}".split(), environment | {"DS_ENV_FILE": str(left)})
    holds(folder, strategy, reference)
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE=2" in left.read_text().splitlines()
