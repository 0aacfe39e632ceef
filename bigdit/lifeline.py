"""A process that ends when another does, whose child it need not be: workers are forked by a server of their own."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading


def end_with(pid: int, number: int) -> None:
    """Have the signal `number` sent to this process when the process `pid` has ended, by a thread that waits for it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        os.kill(os.getpid(), number)
        return
    except OSError:  # Linux before 5.3 has none: what it reads of the other ends all the same
        return

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


def end_with_parent() -> None:
    """Kill this process of multiprocessing when the one that asked for it has ended, however that was."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid, signal.SIGKILL)
