"""Where one process of a run is lost, the others end soon, with one line that names it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import BIN, ROOT
from running import BIGDIT, FSDP2, ZERO2, ended, running, until

from bigdit.train.processes import launch
from bigdit.train.processes.launch import Ranks

# What a run may take to end when one of its processes was killed.
WITHIN_S = 30


def kill_rank(run, rank):
    """Kill one process of a run; the line that says so, when all have ended."""
    ranks = run.until_it_trains().ranks()
    os.kill(ranks[rank], signal.SIGKILL)
    until(lambda: ended(ranks), within=WITHIN_S)
    status = run.ends(within=WITHIN_S)
    assert status != 0
    assert "this is a bug" not in run.stderr
    said = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, run.stderr
    where = f"rank {rank} (process {ranks[rank]} on {os.uname().nodename}) was lost after step "
    assert said[0].startswith(f"error: {where}")
    assert said[0].endswith(": all end; the same command goes on from the last checkpoint")
    return status


@pytest.mark.slow
def test_a_killed_process_of_zero2_leaves_nothing(features, tmp_path):
    """DeepSpeed's collectives of CPUs, of no use in training, are neither compiled nor in shared memory."""
    compiled = tmp_path / "compiled"
    with running(BIGDIT, features, tmp_path / "run", *ZERO2, TORCH_EXTENSIONS_DIR=str(compiled)) as run:
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in run.until_it_trains().ranks()]
        assert "libtorch" in maps[0]
        assert not any("/dev/shm/" in text for text in maps)
        assert kill_rank(run, 1) == 137
        assert "Traceback" not in run.stderr
    assert not compiled.exists()


@pytest.mark.slow
def test_a_killed_process_of_fsdp2(features, tmp_path):
    with running(BIGDIT, features, tmp_path / "run", *FSDP2) as run:
        assert kill_rank(run, 0) == 137
        assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_killed_process_under_torchrun(features, tmp_path):
    torchrun = (BIN / "torchrun", "--standalone", "--nproc-per-node", 2, ROOT / "launch/train.py")
    with running(torchrun, features, tmp_path / "run", *FSDP2) as run:
        kill_rank(run, 1)


# Two processes in a group, of which the second does what is asked.
_GROUP = """
import os, sys, time
from contextlib import contextmanager
import torch.distributed as dist
from bigdit.dist import world_from_env
from bigdit.errors import UserError, guard
from bigdit.train.processes.peers import ending_together
from bigdit.train.processes.process import process_group
from bigdit.train.processes.stop import Stop

@contextmanager
def lost(world):
    if sys.argv[1] == "lost" and not world.is_main:
        os.kill(os.getpid(), 9)
    yield

def main():
    world = world_from_env()
    stop = Stop(10.0, world)
    with process_group(world, needed=True, timeout=float(sys.argv[2])), lost(world), ending_together(world, stop):
        stop.begin(5, float(sys.argv[2]))
        if sys.argv[1] == "both":
            raise UserError("the same on both")
        if not world.is_main:
            if sys.argv[1] == "one":
                raise UserError("on one alone")
            if sys.argv[1] == "bug":
                raise ZeroDivisionError("of one alone")
            time.sleep(100)
        stop.asked(6)
        dist.barrier()

sys.exit(guard(main))
"""


def grouped(capfd, what, timeout=60.0):
    """The exit status and what two processes print."""
    status = Ranks([sys.executable, "-c", _GROUP, what, str(timeout)], 10.0).run(2)
    return status, capfd.readouterr().err


@pytest.fixture(autouse=True)
def from_here(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(("what", "line"), [("both", "the same on both"), ("one", "on one alone")])
def test_an_error_is_said_once_by_whoever_has_it(capfd, what, line):
    assert grouped(capfd, what) == (1, f"error: {line}\n")


def test_a_bug_of_one_process_is_said_by_that_one(capfd):
    status, stderr = grouped(capfd, "bug")
    assert status == 3
    assert stderr.count("ZeroDivisionError: of one alone") == 1
    assert stderr.count("this is a bug in bigdit") == 1
    assert "error: " not in stderr.lower().replace("zerodivisionerror: ", "")


def test_a_process_that_is_lost_before_it_has_told_where_it_is(capfd):
    status, stderr = grouped(capfd, "lost")
    assert status == 137
    assert stderr.startswith("error: of 2 processes one on another machine, or one that does not answer (")
    assert stderr.endswith(", was lost after step 0: all end; the same command goes on from the last checkpoint\n")
    assert stderr.count("\n") == 1


def test_a_process_that_does_not_answer(capfd, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE_S", 1.0)
    began = time.monotonic()
    status, stderr = grouped(capfd, "hangs", timeout=2.0)
    assert status == 1
    assert stderr.startswith("error: of 2 processes one on another machine, or one that does not answer (")
    assert stderr.count("\n") == 1
    assert time.monotonic() - began < 60


def test_a_process_that_a_signal_ends_while_the_main_one_hangs(capfd, monkeypatch):
    """Before the first step the main process alone says that a signal ends it."""
    monkeypatch.setattr("bigdit.train.processes.launch.PATIENCE_S", 1.0)
    script = "import os, sys, time; time.sleep(100) if os.environ['RANK'] == '0' else sys.exit(143)"
    assert Ranks([sys.executable, "-c", script], 10.0).run(2) == 143
    err = capfd.readouterr().err
    assert err.startswith("error: rank 1 (process ")
    assert err.endswith(") was ended by SIGTERM; rank 0 waited for it and had to be killed\n")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("host_bytes", "counted"),
    [(0, "`bigdit plan` counts what it takes"), (48 * 2**30, "its plan counts 48.00 GiB of them")],
)
def test_processes_that_could_not_speak(capfd, monkeypatch, host_bytes, counted):
    """One is killed, and the other does not notice."""
    monkeypatch.setattr(launch, "memory_bytes", lambda: 32 * 2**30)
    monkeypatch.setattr(launch, "PATIENCE_S", 1.0)
    script = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(100)"
    assert Ranks([sys.executable, "-c", script], 10.0, host_bytes).run(2) == 137
    said = capfd.readouterr().err
    assert said.startswith("error: rank 1 (process ")
    assert said.endswith(
        f") was ended by SIGKILL (by hand, or since memory ran out: this machine has 32.00 GiB, and {counted}); rank 0 "
        "waited for it and had to be killed\n"
    )


def test_a_process_that_loses_its_parent_before_it_looks(tmp_path):
    script = "from bigdit.train.processes.orphan import end_with_launcher; end_with_launcher(); print('lives')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"BIGDIT_LAUNCHER": "1"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (-9, b"")
