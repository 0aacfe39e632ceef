"""When a run loses a process, the others end soon, with one line that names it."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commands import BIN, ROOT
from running import BIGDIT, FSDP2, ZERO2, ended, running, until
from two_processes import answer_of_two

from bigdit.train.processes import launch
from bigdit.train.processes.launch import Ranks, free_port

# How long a run may take to end after one of its processes was killed.
WITHIN_S = 30


def kill_rank(run, rank):
    """Kill one process of a run. Returns the line about it, when all have ended."""
    ranks = run.until_it_trains().ranks()
    os.kill(ranks[rank], signal.SIGKILL)
    until(lambda: ended(ranks), within=WITHIN_S)
    status = run.ends(within=WITHIN_S)
    assert status != 0
    assert "this is a bug" not in run.stderr
    printed = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(printed) == 1, run.stderr
    where = f"rank {rank} (process {ranks[rank]} on {os.uname().nodename}) was lost after step "
    assert printed[0].startswith(f"error: {where}")
    assert printed[0].endswith(": all end; the same command resumes from the last checkpoint")
    return status


@pytest.mark.slow
def test_a_killed_process_of_zero2_leaves_nothing(features, tmp_path):
    """DeepSpeed's own CPU collectives are neither compiled nor left in shared memory: training does not use them."""
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


STOPPED = {
    "zero2, its main process": (ZERO2, 0),
    "fsdp2": (FSDP2, 1),
}


@pytest.mark.slow
def test_a_stopped_process_is_named_after_the_timeout(features, tmp_path):
    """One run for each engine, and one whose first process holds the store: all wait for the timeout at once. HSDP's
    groups are tested below."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(running(BIGDIT, features, tmp_path / name, *engine, "train.timeout=5"))
            for name, (engine, _) in STOPPED.items()
        ]
        of_store = stack.enter_context(without_launcher("stops"))
        begun = []
        for run, (_, rank) in zip(runs, STOPPED.values(), strict=True):
            ranks = run.until_it_trains().ranks()
            os.kill(ranks[rank], signal.SIGSTOP)
            begun.append((run, ranks, rank))
        for each in begun:
            stopped_is_named(*each)
        holder_is_named(*of_store)


@contextmanager
def without_launcher(what):
    """Two processes of a launcher that holds no store itself: torch gives requests to a store no timeout."""
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-c", _GROUP, what, "2"]
    ranks = [os.environ | port | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    both = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for env in ranks]
    try:
        yield both
    finally:
        for process in both:
            process.kill()


def holder_is_named(first, second):
    _, printed = second.communicate(timeout=100)
    assert second.returncode == 1
    where = f"rank 0 (process {first.pid} on {os.uname().nodename}), which is stopped, did not "
    assert printed.startswith(f"error: {where}")
    assert printed.count("\n") == 1


def stopped_is_named(run, ranks, rank):
    assert run.ends(within=60) == 1
    assert ended(ranks)
    (printed,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    where = f"rank {rank} (process {ranks[rank]} on {os.uname().nodename}), which is stopped,"
    silent = rf"error: {re.escape(where)} did not answer for 5 s \(train.timeout\), last seen at bigdit/\S+\.py:\d+ "
    rest = r"\([\w<>]+\), after step \d+: all end; the same command resumes from the last checkpoint"
    assert re.fullmatch(silent + rest, printed), printed
    assert "Traceback" not in run.stderr


_EVERY_GROUP = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from resuming import save, started, strategy
from bigdit.dist import world_from_env
from bigdit.train.processes.process import process_group
from bigdit.train.processes.stop import Stop

ENGINES = {f"zero{stage}": strategy("deepspeed", 2, stage) for stage in range(4)}
ENGINES |= {"fsdp2": strategy("fsdp2", 2), "hsdp": strategy("fsdp2", 2, dp_replicate=2)}
ENGINES |= {"ddp": strategy("ddp", 2), "shared": strategy("fsdp2", 2, cp=2)}
world, found = world_from_env(), {}
with process_group(world, needed=True, timeout=37.0):
    groups = dist.distributed_c10d._world.pg_map
    for name, wanted in ENGINES.items():
        before = set(groups)
        engine, ema, step, peers = started(wanted, world)
        Stop(1.0, world).begin(0)
        step()
        save(Path(sys.argv[1]).parent / name, engine, ema, peers)
        backends = [group._get_backend(torch.device("cpu")) for group in groups if group not in before]
        found[name] = [backend.options._timeout.total_seconds() for backend in backends]
        if hasattr(engine.model, "destroy"):
            from bigdit.engines.deepspeed import forget
            forget(engine)
if world.is_main:
    json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.mark.slow
def test_every_group_of_every_engine_has_the_timeout(tmp_path):
    """The groups of training, of the engine, of saving, and that by which processes agree on signals."""
    found = answer_of_two(_EVERY_GROUP, tmp_path)
    assert set(found) == {"zero0", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "ddp", "shared"}
    assert {timeout for timeouts in found.values() for timeout in timeouts} == {37.0}
    assert len(found["zero0"]) > len(found["fsdp2"]) >= 2  # including DeepSpeed's own
    assert len(found["hsdp"]) > len(found["fsdp2"])


# Two processes in a group. The second does what is asked.
_GROUP = """
import os, sys, time
from contextlib import contextmanager
import torch.distributed as dist
from bigdit.dist import world_from_env
from bigdit.errors import UserError, guard
from bigdit.train.processes.stop import ending_together
from bigdit.train.processes.process import process_group
from bigdit.train.processes.stop import Stop

@contextmanager
def lost(world):
    if sys.argv[1] == "lost" and not world.is_main:
        os.kill(os.getpid(), 9)
    yield

def main():
    world = world_from_env()
    stop, timeout = Stop(10.0, world), float(sys.argv[2])
    with process_group(world, needed=True, timeout=timeout), lost(world), ending_together(world, stop, timeout):
        stop.begin(5)
        dist.barrier()
        if sys.argv[1] == "both":
            raise UserError("the same on both")
        if sys.argv[1] == "waits":
            os.kill(os.getpid(), 19) if not world.is_main else time.sleep(100)
        if sys.argv[1] == "stops" and world.is_main:
            os.kill(os.getpid(), 19)
        elif not world.is_main and sys.argv[1] != "stops":
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
    """The exit status and the output of two processes."""
    status = Ranks([sys.executable, "-c", _GROUP, what, str(timeout)], 10.0).run(2)
    return status, capfd.readouterr().err


@pytest.fixture(autouse=True)
def from_here(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(("what", "line"), [("both", "the same on both"), ("one", "on one alone")])
def test_an_error_is_reported_once_by_whoever_has_it(capfd, what, line):
    assert grouped(capfd, what) == (1, f"error: {line}\n")


def test_a_bug_of_one_process_is_reported_by_that_one(capfd):
    status, stderr = grouped(capfd, "bug")
    assert status == 3
    assert stderr.count("ZeroDivisionError: of one alone") == 1
    assert stderr.count("this is a bug in bigdit") == 1
    assert "error: " not in stderr.lower().replace("zerodivisionerror: ", "")


def test_a_process_that_is_lost_before_it_has_reported_where_it_is(capfd):
    status, stderr = grouped(capfd, "lost")
    assert status == 137
    assert stderr.startswith("error: one of 2 processes, on another machine or without an answer (")
    assert stderr.endswith(", was lost after step 0: all end; the same command resumes from the last checkpoint\n")
    assert stderr.count("\n") == 1


def test_a_process_that_does_not_answer(capfd, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE_S", 1.0)
    began = time.monotonic()
    status, stderr = grouped(capfd, "hangs", timeout=2.0)
    assert status == 1
    assert stderr.startswith("error: rank 1 (process ")
    assert (
        f" on {os.uname().nodename}) did not answer for 2 s (train.timeout), last seen at bigdit/errors.py:" in stderr
    )
    assert ", after step 6: all end; " in stderr
    assert stderr.count("\n") == 1
    assert time.monotonic() - began < 60


def test_a_stopped_process_is_found_by_one_that_no_error_reaches(capfd, monkeypatch):
    """It stands for a process that waits for a GPU."""
    monkeypatch.setattr(launch, "PATIENCE_S", 1.0)
    began = time.monotonic()
    status, stderr = grouped(capfd, "waits", timeout=2.0)
    assert status == 1
    where = (
        f" on {os.uname().nodename}), which is stopped, did not answer for 2 s (train.timeout), last seen at bigdit/"
    )
    assert stderr.startswith("error: rank 1 (process ")
    assert where in stderr
    assert stderr.count("\n") == 1
    assert time.monotonic() - began < 60


def test_a_process_that_a_signal_ends_while_the_main_one_hangs(capfd, monkeypatch):
    """Before the first step, the main process alone says that a signal ends the run."""
    monkeypatch.setattr("bigdit.train.processes.launch.PATIENCE_S", 1.0)
    script = "import os, sys, time; time.sleep(100) if os.environ['RANK'] == '0' else sys.exit(143)"
    assert Ranks([sys.executable, "-c", script], 10.0).run(2) == 143
    err = capfd.readouterr().err
    assert err.startswith("error: rank 1 (process ")
    assert err.endswith(") was ended by SIGTERM; rank 0 waited for it and had to be killed\n")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("host_bytes", "counted"),
    [(0, "`bigdit plan` counts what the run takes"), (48 * 2**30, "its plan counts 48.00 GiB of it")],
)
def test_processes_that_could_not_speak(capfd, monkeypatch, host_bytes, counted):
    """One is killed, and the other does not notice."""
    monkeypatch.setattr(launch, "memory_bytes", lambda: 32 * 2**30)
    monkeypatch.setattr(launch, "PATIENCE_S", 1.0)
    script = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(100)"
    assert Ranks([sys.executable, "-c", script], 10.0, host_bytes).run(2) == 137
    printed = capfd.readouterr().err
    assert printed.startswith("error: rank 1 (process ")
    assert printed.endswith(
        f") was ended by SIGKILL (by hand, or because memory ran out: this machine has 32.00 GiB, and {counted}); rank "
        "0 waited for it and had to be killed\n"
    )


def test_processes_that_abort_since_another_is_stopped(capfd, monkeypatch):
    """NCCL's watchdog aborts them so."""
    monkeypatch.setattr(launch, "PATIENCE_S", 1.0)
    script = "import os; os.kill(os.getpid(), 19) if os.environ['RANK'] == '1' else os.abort()"
    assert Ranks([sys.executable, "-c", script], 10.0).run(2) == 134
    printed = capfd.readouterr().err.splitlines()[-1]
    assert printed.startswith("error: rank 1, which was stopped, did not answer; rank 0 (process ")
    assert printed.endswith(") was ended by SIGABRT")


def test_a_process_that_loses_its_parent_before_it_looks(tmp_path):
    script = "from bigdit.train.processes.end import end_with_launcher; end_with_launcher(); print('lives')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"BIGDIT_LAUNCHER": "1"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (-9, b"")
