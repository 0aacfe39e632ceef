"""A run's processes start their commands anew: nothing of torch, NCCL, DeepSpeed or the allocator is left of before.

By execve each stays its launcher's child. The main one goes last, since the store by which they meet may be its own: a
process that came back before it would find the old one.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import NoReturn

import torch.distributed as dist

from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.train.processes.end import heeded
from bigdit.train.processes.process import STARTS

_HEARD_WITHIN_S = 0.2
_GOING, _LEFT = "anew", "anew: left"


def all_may_start(store: dist.Store | None, world: World, ready: bool) -> bool:
    """Whether the main process is `ready`, once all know it, and all others leave; None: there is one alone."""
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
    """Let signals end this process, once those that came are heard; python's own are the main thread's to set."""
    for each in heeded():
        ctypes.CDLL(None).signal(int(each), 0)  # SIG_DFL
    time.sleep(_HEARD_WITHIN_S)


def start_all_again(store: dist.Store | None, world: World) -> NoReturn:
    """All processes' commands anew, once training has left all that it had entered. Raises UserError where one of them
    is lost."""
    be_ended_by_signals()
    try:
        all_may_start(store, world, ready=True)
    except RuntimeError as error:
        why = (str(error).splitlines() or [""])[0][:200]
        raise UserError(
            f"not all processes came to start again: {why}; the same command goes on from the last checkpoint"
        ) from error
    start_again()


def start_again() -> NoReturn:
    """This process's command anew, in this very process."""
    os.environ[STARTS] = str(int(os.environ.get(STARTS, "0")) + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
