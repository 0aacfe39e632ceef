"""launch/slurm/train.sbatch under stubs of srun and scontrol: what SLURM's warning does, what the queue is told."""

import os
import signal
from pathlib import Path

import pytest
from commands import BIN, DIGITS, ROOT
from running import FSDP2, running

# Starts the tasks as srun does, and hands SLURM's warning to each.
_SRUN = """#!/usr/bin/env python
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = []
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
for rank in range(int(os.environ["SLURM_NTASKS"])):
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
    tasks.append(subprocess.Popen(command, env=os.environ | place))
open(os.environ["STUB"] + "/srun.pid", "w").write(str(os.getpid()))
statuses = [task.wait() for task in tasks]
sys.exit(max(status if status >= 0 else 128 - status for status in statuses))
"""
_SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$STUB/scontrol.log"; fi
"""


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job of two tasks, each on a machine of its own, which is this one."""
    stub = tmp_path / "stub"
    stub.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (stub / name).write_text(text)
        (stub / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "2"}
    return job | {"SLURM_JOB_NUM_NODES": "2", "STUB": str(stub), "PATH": f"{stub}:{BIN}:{os.environ['PATH']}"}


@pytest.mark.slow
def test_slurms_warning_saves_and_puts_the_job_back_into_the_queue(features, tmp_path, slurm):
    output, stub = tmp_path / "run", Path(slurm["STUB"])
    job = ("bash", ROOT / "launch/slurm/train.sbatch", DIGITS)
    with running(job, features, output, *FSDP2, **slurm) as run:
        run.until_it_trains()
        os.kill(int((stub / "srun.pid").read_text()), signal.SIGUSR1)
        assert run.ends() == 0, run.stderr
    (step,) = run.saved()
    assert run.stderr.count(f"SIGUSR1: saved {output}/checkpoints/step-{step:08d}; ") == 1
    assert (stub / "scontrol.log").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"

    ends = ("train.lr_schedule=constant", f"train.steps={step + 2}")
    with running(job, features, output, *FSDP2, *ends, log=tmp_path / "again.log", **slurm) as again:
        assert again.ends(within=120) == 0, again.stderr
    assert again.saved()[-1] == step + 2
    assert (stub / "scontrol.log").read_text().count("requeue") == 1


def test_another_failure_is_not_queued_again(tmp_path, features, slurm):
    job = ("bash", ROOT / "launch/slurm/train.sbatch", tmp_path / "none.yaml")
    with running(job, features, tmp_path / "run", "train.seed=-1", **slurm) as run:
        assert run.ends() == 1
    assert "train.seed is -1, and 0 or more was expected" in run.stderr
    assert not (Path(slurm["STUB"]) / "scontrol.log").exists()
