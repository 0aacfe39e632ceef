"""One trainer an output: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from bigdit import log
from bigdit.dist import World
from bigdit.documents import parse_json
from bigdit.errors import UserError
from bigdit.files import WITHOUT_LOCKS

FILE = "lock"
# A process that was killed holds its lock until the kernel has taken its memory away.
PATIENCE_S = 5.0


@contextmanager
def held(output: Path, world: World) -> Iterator[None]:
    """Hold the output for this group of processes; raises UserError on all of them where another one holds it.

    It is flock(2) by the main process on `OUTPUT/lock`: free when the process has ended. It is seen by all processes
    of a machine, and by other machines where the file system passes locks on: NFS 4, NFS 3 with lockd, Lustre mounted
    with flock; not NFS mounted with nolock or local_lock, nor Lustre with localflock.
    """
    descriptor, problem = None, None
    if world.is_main:
        try:
            descriptor = _take(output)
        except UserError as error:
            problem = str(error)
    if world.world_size > 1:
        shared = [problem]
        dist.broadcast_object_list(shared)
        dist.barrier()  # the main process may hold the store that this goes by: it must not end before the others
        problem = shared[0]
    if problem is not None:
        raise UserError(problem)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _take(output: Path) -> int:
    """The descriptor of the locked file. Raises UserError where another process holds it, or it cannot be written."""
    path = output / FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another output") from error
    try:
        if not _locked(descriptor):
            raise UserError(
                f"output {output} is in use by {_holder(descriptor)}; wait for it, end it, or choose another output"
            )
        _sign(descriptor)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in WITHOUT_LOCKS:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another output") from error
        log.notice(f"note: {path} cannot be locked ({error.strerror}): a second trainer there would not be noticed")
        return os.open(os.devnull, os.O_RDONLY)
    except UserError:
        os.close(descriptor)
        raise
    return descriptor


def _locked(descriptor: int) -> bool:
    """Whether the lock was had within the patience."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


def _sign(descriptor: int) -> None:
    """Write down who holds the lock."""
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(sys.orig_argv),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)


def _holder(descriptor: int) -> str:
    """Who signed the lock. The holder may be about to sign, and then it is not known."""
    with suppress(ValueError, KeyError, TypeError):
        found = parse_json(os.pread(descriptor, 1 << 16, 0))
        command = str(found["command"])
        shown = command if len(command) <= 160 else command[:80] + " … " + command[-80:]
        return f"process {int(found['pid'])} on {found['host']!s:.80} since {found['since']!s:.30} ({shown!s})"
    return "another process"
