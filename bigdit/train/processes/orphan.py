"""A trainer ends with the launcher that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from bigdit.die_with_parent import end_with

LAUNCHER = "BIGDIT_LAUNCHER"
"""The process id of `bigdit train`, in the environment of what it starts."""

# What torchrun (accelerate too) and DeepSpeed's launcher set for their workers. A process that a shell started must
# outlive it: nohup.
_LAUNCHED = (LAUNCHER, "TORCHELASTIC_RUN_ID", "CROSS_RANK")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> None:
    """Have the kernel signal this process when its launcher has ended; only Linux does so.

    `bigdit train` heeds the signals that it gets, so that only SIGKILL ends it before its processes: they are killed.
    Others die of signals that they do not know, such as SIGUSR1: that is SIGTERM to theirs, which save and end.
    """
    if sys.platform != "linux" or not any(name in os.environ for name in _LAUNCHED):
        return
    own = LAUNCHER in os.environ
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if own else signal.SIGTERM)
    if own and os.environ[LAUNCHER] != str(os.getppid()):  # it had ended before
        os.kill(os.getpid(), signal.SIGKILL)
    if "CROSS_RANK" in os.environ:
        _end_with_runner()


def _end_with_runner() -> None:
    """`deepspeed` starts the launcher proper, which lives on when `deepspeed` is killed: take that for SIGTERM."""
    try:
        runner = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        if b"deepspeed" not in Path(f"/proc/{runner}/cmdline").read_bytes():  # on several machines it is another's
            return
    except OSError:  # it has ended, or is not ours to see
        return
    end_with(runner, signal.SIGTERM)
