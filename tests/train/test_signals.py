"""Signals end training in order with a checkpoint, and children end with their parent: real launchers, real signals."""

import os
import signal
import subprocess
import sys
import time

import pytest
from commands import BIN, ROOT, SINGLE
from running import BIGDIT, FSDP2, ZERO2, ended, running, until

from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.processes.launch import free_port

TRAIN = ROOT / "launch/train.py"


def resumed(stderr):
    return " ".join(stderr.split())


@pytest.mark.slow
def test_bigdit_train_saves_on_a_signal_and_takes_its_processes_with_it(features, tmp_path):
    """SLURM's warning; then the same command again, which is killed."""
    output = tmp_path / "run"
    with running(BIGDIT, features, output, *FSDP2) as run:
        run.until_it_trains().process.send_signal(signal.SIGUSR1)
        assert run.ends() == 138
        (step,) = run.saved()
        printed = f"SIGUSR1: saved {output}/checkpoints/step-{step:08d}; the same command resumes from step {step}"
        assert run.stderr.count(printed) == 1
        assert "Traceback" not in run.stderr
    with running(BIGDIT, features, output, *FSDP2, log=tmp_path / "again.log") as again:
        ranks = again.until_it_trains().ranks()
        assert f"resuming from {output}/checkpoints/step-{step:08d}, step {step}" in resumed(again.stderr)
        assert len(ranks) == 2
        again.process.kill()
        until(lambda: ended(ranks), within=5)
    steps = [row["step"] for row in read_metrics(output / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_torchrun_hands_the_signal_on_and_its_workers_end_with_it(features, tmp_path):
    output = tmp_path / "run"
    torchrun = (
        BIN / "torchrun",
        "--standalone",
        "--nproc-per-node",
        2,
        "--signals-to-handle",
        "SIGTERM,SIGUSR1",
        TRAIN,
    )
    with running(torchrun, features, output, *FSDP2) as run:
        run.until_it_trains().process.send_signal(signal.SIGUSR1)
        assert run.ends() != 0
        (step,) = run.saved()
        assert run.stderr.count(f"SIGUSR1: saved {output}/checkpoints/step-{step:08d}; ") == 1
        assert run.stderr.count(f"wrote {output}/report.html\n") == 1
    assert f"{step:,} of 1,000,000 steps" in (output / "report.html").read_text()
    with running(torchrun, features, output, *FSDP2, log=tmp_path / "again.log") as again:
        ranks = again.until_it_trains().ranks()
        os.killpg(again.process.pid, signal.SIGKILL)
        until(lambda: ended(ranks), within=60)
        saved, last = again.saved()
        assert last > saved == step
        assert again.stderr.count(f"SIGTERM: saved {output}/checkpoints/step-{last:08d}; ") == 1


@pytest.mark.slow
def test_a_signal_to_deepspeed_saves(features, tmp_path):
    """The signal ends `deepspeed` itself, so that it does not pass it on."""
    output = tmp_path / "run"
    deepspeed = (BIN / "deepspeed", "--num_gpus", 2, "--master_port", free_port(), TRAIN)
    with running(deepspeed, features, output, *ZERO2) as run:
        ranks = run.until_it_trains().ranks()
        os.kill(run.process.pid, signal.SIGUSR1)
        run.ends()
        until(lambda: ended(ranks), within=60)
        (step,) = run.saved()
        assert run.stderr.count(f"SIGTERM: saved {output}/checkpoints/step-{step:08d}; ") == 1


@pytest.mark.slow
def test_ctrl_c_once_saves(features, tmp_path):
    """As a terminal sends it, to the whole group."""
    output = tmp_path / "run"
    with running(BIGDIT, features, output, *SINGLE) as run:
        run.until_it_trains()
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.ends() == 130
        (step,) = run.saved()
        assert run.stderr.splitlines()[-2:] == [
            f"SIGINT: saved {output}/checkpoints/step-{step:08d}; the same command resumes from step {step}",
            f"wrote {output}/report.html",
        ]
    assert f"{step:,} of 1,000,000 steps" in (output / "report.html").read_text()


# Wait for signals while the main thread hangs, as in a collective whose peer is gone.
_HANGS = """
import sys, time
from bigdit.dist import World
from bigdit.train.processes.stop import Stop
stop = Stop(float(sys.argv[1]), World())
with stop.listening():
    if sys.argv[2] == "training":
        stop.begin(7)
    print("ready", flush=True)
    while True:
        time.sleep(100)
"""


def hanging(grace, where, *signals):
    """The exit status, stderr and seconds of a process that hangs and gets signals 0.7 s apart."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HANGS, str(grace), where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        for each in signals:
            process.send_signal(each)
            time.sleep(0.7)
        _, stderr = process.communicate(timeout=20)
        return process.returncode, stderr, time.monotonic() - began
    finally:
        process.kill()
        process.wait()


def test_when_the_grace_runs_out_the_process_ends():
    status, stderr, seconds = hanging(1.5, "training", signal.SIGTERM, signal.SIGUSR1)
    assert (status, stderr) == (
        143,
        "SIGTERM: the grace of 1.5 s ran out before a checkpoint was saved (train.grace); step 7\n",
    )
    assert 1.4 < seconds < 5


def test_ctrl_c_twice_ends_at_once():
    status, stderr, seconds = hanging(100, "training", signal.SIGINT, signal.SIGINT)
    assert (status, stderr) == (130, "SIGINT: ended at once, without a checkpoint; step 7\n")
    assert seconds < 5


def test_before_the_first_step_there_is_nothing_to_save():
    status, stderr, seconds = hanging(100, "loading", signal.SIGTERM)
    assert (status, stderr) == (143, "SIGTERM: ended before a step was taken; step 0\n")
    assert seconds < 5
