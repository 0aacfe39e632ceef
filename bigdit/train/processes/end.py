"""How a launched process ends: by signals that end training in order, with its launcher, or by itself."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from bigdit.die_with_parent import end_with

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A shell has what it starts in the background pass over the first, nohup over the other: so it stays.
_LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """Those of `SIGNALS` that this process is to take."""
    return [each for each in SIGNALS if each not in _LEFT_IGNORED or signal.getsignal(each) is not signal.SIG_IGN]


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


def leave(status: int) -> NoReturn:
    """End with `status` as the interpreter would, but that it is not taken apart: a thread of gloo that lets go of its
    last tensor meanwhile aborts the process (torch 2.13, c10d::ProcessGroupGloo::runLoop), and a run that is whole
    would end as one that failed."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 120  # as the interpreter ends where its last words are lost
    os._exit(status)
