"""Removes what an emulation leaves, even if bigdit was killed: its processes, folder and shared memory.

It runs as a separate process, which waits for the end of its standard input. That comes when bigdit closes it or dies.
It uses only the standard library, to start at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

PATIENCE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def processes(folder: Path) -> list[int]:
    """Processes whose environment has `folder` for their accounts, whatever their parents are."""
    mark = f"BIGDIT_EMULATED_OUT={folder}/".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(each.startswith(mark) for each in (entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return [pid for pid in found if pid != os.getpid() and not _is_zombie(pid)]


def end(folder: Path, patience_s: float = PATIENCE_S) -> None:
    """End all processes of an emulation: terminate, wait, then kill."""
    _signal(processes(folder), signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while (left := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    while left:
        _signal(left, signal.SIGKILL)
        time.sleep(0.05)
        left = processes(folder)


def remove(folder: Path) -> None:
    """Remove the folder, and shared memory with its name."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in Path("/dev/shm").glob(f"*{folder.name}*"):
        file.unlink(missing_ok=True)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(Path(sys.argv[1]))
    remove(Path(sys.argv[1]))
