"""bigdit's own processes: the commands that start them, from its repository or from an installed package; and how they
end with another process, not only with their parent, and leave Ctrl-C to it."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The repository, or the folder of packages if pip installed bigdit."""


def in_checkout() -> bool:
    """Whether bigdit runs from its repository, which has a Makefile."""
    return (ROOT / "Makefile").exists()


def own_module(name: str) -> tuple[str, ...]:
    """Python's options that run this module. -P keeps it from importing modules of the working folder, such as another
    checkout."""
    return "-P", "-m", name


def entry(module_option: str = "-m") -> tuple[str, ...]:
    """What python or a launcher starts to train: the repository's script, or a module by `module_option`."""
    return (os.path.relpath(ROOT / "launch/train.py"),) if in_checkout() else (module_option, "bigdit.launch")


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
    import multiprocessing  # here: a plan of the cache does without

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
