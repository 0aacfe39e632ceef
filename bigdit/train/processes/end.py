"""How a launched process ends: by signals that end training in order, with its launcher, or by itself."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bigdit.dist import World
from bigdit.errors import EXIT_USER, UserError
from bigdit.processes import end_with

if TYPE_CHECKING:
    import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# Shells have background jobs ignore the first, nohup has its command ignore the other: that stays so.
_LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """Those of `SIGNALS` that this process handles."""
    return [each for each in SIGNALS if each not in _LEFT_IGNORED or signal.getsignal(each) is not signal.SIG_IGN]


LAUNCHER = "BIGDIT_LAUNCHER"
"""The process id of `bigdit train`, in the environment of its processes."""

# What torchrun (accelerate too) and DeepSpeed's launcher set for their workers. A process that a shell started must
# outlive it: nohup.
_LAUNCHED = (LAUNCHER, "TORCHELASTIC_RUN_ID", "CROSS_RANK")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> None:
    """Have the kernel signal this process when its launcher has ended; only Linux does so.

    `bigdit train` handles signals, so that only SIGKILL ends it before its processes: they are killed too. Other
    launchers die of signals that they do not know, such as SIGUSR1: their processes get SIGTERM, save and end.
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
    """`deepspeed` starts the actual launcher, which survives when `deepspeed` is killed: take that for SIGTERM."""
    try:
        runner = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        if (
            b"deepspeed" not in Path(f"/proc/{runner}/cmdline").read_bytes()
        ):  # on several machines it is another program
            return
    except OSError:  # it has ended, or is another user's
        return
    end_with(runner, signal.SIGTERM)


PATIENCE_S = 10.0
"""Seconds that a process without a message of its own waits for the one that has it, at most."""


def leave(status: int) -> NoReturn:
    """End with `status` as the interpreter would, but without taking it apart.

    There a gloo thread that lets go of its last tensor aborts the process (torch 2.13,
    c10d::ProcessGroupGloo::runLoop), and a finished run would end as one that failed.
    """
    if status == EXIT_USER and os.environ.get("RANK", "0") != "0" and LAUNCHER not in os.environ:
        time.sleep(PATIENCE_S)  # torchrun ends all when one has failed: the one with the message ends first
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 120  # as the interpreter ends where it cannot flush
    os._exit(status)


STARTS = "BIGDIT_STARTS"
"""How often a process has restarted its command. After each restart the processes meet under other keys."""

_HEARD_WITHIN_S = 0.2
_GOING, _LEFT = "restart", "restart: left"


def all_may_start(store: dist.Store | None, world: World, ready: bool) -> bool:
    """Whether the main process is `ready`, once all know it and all others have left. `store`: None for a single
    process."""
    if store is None:
        return ready
    left = [f"{_LEFT} {rank}" for rank in range(1, world.world_size)]
    if world.is_main:
        store.set(_GOING, str(ready))
        store.wait(left)
        return ready
    ready = store.get(_GOING) == b"True"
    store.set(f"{_LEFT} {world.rank}", "")
    return ready


def be_ended_by_signals() -> None:
    """Let signals end this process, once those that came are handled. Only the main thread can set python's own
    handlers."""
    for each in heeded():
        ctypes.CDLL(None).signal(int(each), 0)  # SIG_DFL
    time.sleep(_HEARD_WITHIN_S)


def restart_all(store: dist.Store | None, world: World) -> NoReturn:
    """Restart the commands of all processes, after training has ended. Raises UserError where one of them is lost."""
    be_ended_by_signals()
    try:
        all_may_start(store, world, ready=True)
    except RuntimeError as error:
        why = (str(error).splitlines() or [""])[0][:200]
        raise UserError(
            f"not all processes came to restart: {why}; the same command resumes from the last checkpoint"
        ) from error
    restart()


def restart() -> NoReturn:
    """Restart this process's command, in this very process."""
    os.environ[STARTS] = str(int(os.environ.get(STARTS, "0")) + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
