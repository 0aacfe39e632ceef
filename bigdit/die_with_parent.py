"""Processes that end when another one ends, not only their parent, and that leave Ctrl-C to it."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDED, STOPPED = ("Z", "X"), ("T", "t")
"""States of processes, as proc_pid_stat(5) has them."""


def end_with(pid: int, number: int) -> None:
    """Send the signal `number` to this process when the process `pid` has ended; a thread waits for that."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        os.kill(os.getpid(), number)
        return
    except OSError:  # Linux before 5.3 has no pidfd_open: a closed pipe ends this process anyway
        return

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


def state_of(pid: int) -> str:
    """The letter of a process's state; X for a missing process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def end_with_parent() -> None:
    """Kill this process of multiprocessing when its parent has ended, for whatever reason."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid, signal.SIGKILL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Processes that are started within ignore Ctrl-C, which a terminal sends to all; this one handles it and ends
    them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
