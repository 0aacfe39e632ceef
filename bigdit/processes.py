"""bigdit's own processes: how they are started, end with another process, and ignore Ctrl-C."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The repository, or site-packages if bigdit is installed."""


def in_checkout() -> bool:
    """Whether bigdit runs from its repository, which has a Makefile."""
    return (ROOT / "Makefile").exists()


def own_module(name: str) -> tuple[str, ...]:
    """Python's options that run this module; -P: do not import modules of the working folder, such as another
    checkout."""
    return "-P", "-m", name


def entry(module_option: str = "-m") -> tuple[str, ...]:
    """The arguments with which python or a launcher trains: the repository's script, or a module by `module_option`."""
    return (os.path.relpath(ROOT / "launch/train.py"),) if in_checkout() else (module_option, "bigdit.launch")


ENDED, STOPPED = ("Z", "X"), ("T", "t")
"""States of processes in proc_pid_stat(5)."""


def end_with(pid: int, number: int) -> None:
    """Send the signal `number` to this process when the process `pid` ends; a thread waits for that."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it ended already
        os.kill(os.getpid(), number)
        return
    except OSError:  # Linux before 5.3 lacks pidfd_open; a closed pipe ends this process later
        return

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


def state_of(pid: int) -> str:
    """The letter of a process's state; X if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def end_with_parent() -> None:
    """Kill this process of multiprocessing when its parent ends for any reason."""
    import multiprocessing  # here: a plan from the cache does not need it

    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid, signal.SIGKILL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let processes that are started inside ignore Ctrl-C, which a terminal sends to all. This process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
