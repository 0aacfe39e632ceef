"""One trainer an output: a second is refused by a line, on all its processes, before it writes."""

import json
import os
import signal

import pytest
from commands import BIN, ROOT, SINGLE, run_command
from running import BIGDIT, FSDP2, arguments, running

from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.processes.process import output_lock


@pytest.mark.slow
def test_a_second_trainer_is_refused_and_the_first_continues(features, tmp_path):
    output = tmp_path / "run"
    with running(BIGDIT, features, output, *SINGLE) as first:
        first.until_it_trains()
        holder = json.loads((output / "lock").read_text())
        own = (BIN / "torchrun", "--standalone", "--nproc-per-node", 2, ROOT / "launch/train.py")
        before = os.stat(output / "checkpoints").st_mtime_ns if (output / "checkpoints").exists() else None
        os.kill(holder["pid"], signal.SIGSTOP)  # it holds the lock, and leaves the core to the second
        try:
            second = run_command(*own, *arguments(features, output, *FSDP2, "train.checkpoint_every=1"), timeout=120)
        finally:
            os.kill(holder["pid"], signal.SIGCONT)
        assert second.returncode == 1
        printed = [line for line in second.stderr.splitlines() if line.startswith("error: ")]
        assert len(printed) == 1, second.stderr
        where = f"process {holder['pid']} on {os.uname().nodename} since {holder['since']}"
        assert printed[0].startswith(f"error: output {output} is in use by {where} ({holder['command'][:40]}")
        assert printed[0].endswith("); wait for it, end it, or choose another output")
        assert "bigdit" not in second.stderr.partition(printed[0])[2]  # torchrun adds its own traceback
        assert before is None or before == os.stat(output / "checkpoints").st_mtime_ns
        first.process.send_signal(signal.SIGTERM)
        assert first.ends() == 143
    (step,) = first.saved()
    assert [row["step"] for row in read_metrics(output / "metrics.jsonl")] == list(range(1, step + 1))


def test_the_lock_is_free_when_its_holder_was_killed(tmp_path):
    """The holder kills itself. Its signature stays, and does not count."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from bigdit.dist import World; from bigdit.train.processes.process import output_lock\n"
        "with output_lock(Path(sys.argv[1]), World()): os.kill(os.getpid(), 9)"
    )
    assert run_command(BIN / "python", "-c", script, tmp_path, PYTHONPATH=str(ROOT)).returncode == -9
    left = json.loads((tmp_path / "lock").read_text())
    with output_lock(tmp_path, World()):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid() != left["pid"]


def test_a_lock_that_nobody_signed(tmp_path, monkeypatch):
    monkeypatch.setattr("bigdit.train.processes.process.PATIENCE_S", 0.0)
    with output_lock(tmp_path, World()):
        for written in ("", "[1]", '{"pid": "x"}', "\0", "[" * 60_000):
            (tmp_path / "lock").write_text(written)
            with (
                pytest.raises(UserError, match="is in use by another process; wait for it"),
                output_lock(tmp_path, World()),
            ):
                pass


@pytest.mark.parametrize("place", ["file", "file/run", "folder", "/proc/run", "/sys/run"])
def test_an_output_that_cannot_be_written(tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder/lock").mkdir(parents=True)
    with (
        pytest.raises(UserError, match=r"cannot write .*/lock: .*; choose another output"),
        output_lock(tmp_path / place, World()),
    ):
        pass


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with output_lock(tmp_path, World()):
        assert "lock cannot be locked (Function not implemented): a second trainer" in capsys.readouterr().err
