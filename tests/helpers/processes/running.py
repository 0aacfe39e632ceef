"""Real training runs to signal, kill and watch."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from commands import BIN, DIGITS, ROOT, TINY, reading, with_set

FSDP2 = ("strategy.engine=fsdp2", "strategy.ds_config=null")
ZERO2 = ()
ENDLESS = ("train.steps=1000000", "train.checkpoint_every=100000")
BIGDIT = (BIN / "bigdit", "train")
LIMIT_S = 400  # other work may keep this machine busy


def arguments(features, output, *overrides):
    """Arguments of `bigdit train` or launch/train.py for a tiny run without an end."""
    return [
        "--config",
        DIGITS,
        *with_set([*TINY, *ENDLESS, *reading(features), f"output={output}", *overrides]),
    ]


class Run:
    """A run in its own process group, as a shell starts it."""

    def __init__(self, process, output, log):
        self.process, self.output, self.log = process, output, log

    @property
    def stderr(self):
        return self.log.read_text()

    def until_it_trains(self):
        """Wait for the first rows of its metrics. Returns the training processes by rank."""
        rows = self.output / "metrics.jsonl"
        before = rows.read_text() if rows.exists() else ""
        until(lambda: self.process.poll() is not None or (rows.exists() and rows.read_text() not in (before, "")))
        assert self.process.poll() is None, self.stderr
        return self

    def ranks(self):
        """Ids of the training processes: those with this output that start no others."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            except OSError:
                continue
            variables = dict(line.split(b"=", 1) for line in environment.split(b"\0") if b"=" in line)
            if f"output={self.output}".encode() in command.split(b"\0") and b"RANK" in variables:
                found[int(variables[b"RANK"])] = int(folder.name)
        return [found[rank] for rank in sorted(found)]

    def ends(self, within=60):
        """Wait for the end. Returns the exit status."""
        return self.process.wait(timeout=within)

    def saved(self):
        """Steps of its checkpoints; `latest` names the last."""
        folder = self.output / "checkpoints"
        names = sorted(path.name for path in folder.iterdir() if path.name != "latest")
        assert (folder / "latest").read_text().strip() == names[-1]
        return [int(name.removeprefix("step-")) for name in names]


@contextmanager
def running(command, features, output, *overrides, log=None, **environment):
    """Start a run by `command`, and end all of it afterwards."""
    log = log or output.with_suffix(".log")
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": f"{BIN}:{os.environ['PATH']}"}
    line = [str(part) for part in (*command, *arguments(features, output, *overrides))]
    with open(log, "w") as stderr:
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=os.environ | threads | environment,
            stdout=stderr,
            stderr=stderr,
            process_group=0,
        )
    run = Run(process, output, log)
    try:
        yield run
    finally:
        for pid in [process.pid, *run.ranks()] if process.poll() is None else run.ranks():
            os.kill(pid, signal.SIGKILL)
        process.wait()


def until(condition, within=LIMIT_S):
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(pids):
    """Whether all of the processes have ended."""
    return not any(Path(f"/proc/{pid}").exists() and " Z " not in _stat(pid) for pid in pids)


def _stat(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "
