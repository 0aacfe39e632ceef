"""How a launched process ends: by signals, with its launcher, or by itself; and how it restarts."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bigdit.dist import World
from bigdit.errors import EXIT_USER, UserError
from bigdit.processes import end_with

if TYPE_CHECKING:
    import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# Shells let background jobs ignore SIGINT, and nohup lets its command ignore SIGHUP: bigdit ignores them too then.
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)


def handled_signals() -> list[signal.Signals]:
    """Those of `SIGNALS` that this process handles."""
    return [each for each in SIGNALS if each not in _MAY_BE_IGNORED or signal.getsignal(each) is not signal.SIG_IGN]


LAUNCHER = "BIGDIT_LAUNCHER"
"""The process id of `bigdit train`, in the environment of its processes."""

# Variables that torchrun (accelerate too) and DeepSpeed's launcher set for their workers. A process that a shell
# started may outlive the shell (nohup).
_LAUNCHED = (LAUNCHER, "TORCHELASTIC_RUN_ID", "CROSS_RANK")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> None:
    """Let the kernel signal this process when its launcher ends; only Linux does so.

    `bigdit train` handles signals. Only SIGKILL ends it before its processes, and then they are killed too. Signals
    such as SIGUSR1 kill other launchers. Their processes get SIGTERM, save and end.
    """
    if sys.platform != "linux" or not any(name in os.environ for name in _LAUNCHED):
        return
    own = LAUNCHER in os.environ
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if own else signal.SIGTERM)
    if own and os.environ[LAUNCHER] != str(os.getppid()):  # it ended before prctl
        os.kill(os.getpid(), signal.SIGKILL)
    if "CROSS_RANK" not in os.environ:
        return
    # `deepspeed` starts the actual launcher, which survives when `deepspeed` is killed: end with `deepspeed` too.
    with suppress(OSError):  # it ended, or belongs to another user
        runner = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        if b"deepspeed" in Path(f"/proc/{runner}/cmdline").read_bytes():  # on several machines another program
            end_with(runner, signal.SIGTERM)


PATIENCE_S = 10.0
"""Seconds that a process without an error message waits for the one that has it."""


def leave(status: int) -> NoReturn:
    """End with `status` after the exit handlers, without finalizing the interpreter.

    During finalization a gloo thread that frees its last tensor aborts the process, and a finished run would look
    failed (torch 2.13, c10d::ProcessGroupGloo::runLoop).

    Ctrl-C meanwhile ends the process at once, with the same status.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not a trainer's handler, and not ignored
        signal.signal(signal.SIGINT, lambda *_: _end(status))
    if status == EXIT_USER and os.environ.get("RANK", "0") != "0" and LAUNCHER not in os.environ:
        time.sleep(PATIENCE_S)  # torchrun ends all when one fails: the process with the message must end first
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _end(status)


def _end(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, RuntimeError):  # RuntimeError: Ctrl-C came within a flush that waits for the reader
            status = status or 120  # the interpreter's status when it cannot flush
    os._exit(status)


STARTS = "BIGDIT_STARTS"
"""How often a process restarted its command. After each restart the processes use other keys of the store."""

_HANDLED_WITHIN_S = 0.2
_READY, _LEFT = "restart", "restart: left"


def all_may_start(store: dist.Store | None, world: World, ready: bool) -> bool:
    """Whether the main process is `ready`; returns when all processes know it and all others have left.

    `store`: None for a single process.
    """
    if store is None:
        return ready
    left = [f"{_LEFT} {rank}" for rank in range(1, world.world_size)]
    if world.is_main:
        store.set(_READY, str(ready))
        store.wait(left)
        return ready
    ready = store.get(_READY) == b"True"
    store.set(f"{_LEFT} {world.rank}", "")
    return ready


def be_ended_by_signals() -> None:
    """Let signals end this process from now on; returns when the earlier ones are handled."""
    for each in handled_signals():
        ctypes.CDLL(None).signal(int(each), 0)  # SIG_DFL; Python's own signal() works in the main thread alone
    time.sleep(_HANDLED_WITHIN_S)


def restart_all(store: dist.Store | None, world: World) -> NoReturn:
    """Restart the commands of all processes after training has ended. Raises UserError if one of them is lost."""
    be_ended_by_signals()
    try:
        all_may_start(store, world, ready=True)
    except RuntimeError as error:
        why = (str(error).splitlines() or [""])[0][:200]
        raise UserError(
            f"not all processes were ready to restart: {why}; the same command resumes from the last checkpoint"
        ) from error
    restart()


def restart() -> NoReturn:
    """Replace this process by a new start of its command."""
    os.environ[STARTS] = str(int(os.environ.get(STARTS, "0")) + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
