"""What ends a group of processes is said once, in a line, by the first that knows; and then all end."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from bigdit.dist import World
from bigdit.errors import EXIT_USER, UserError
from bigdit.train.processes.stop import Stop

# How long a process may take to end, after its connections broke.
PATIENCE_S = 5.0
# What gloo, NCCL and torch's store say where another process has ended, or does not answer.
SIGNS = (
    "gloo/transport",
    "connection closed",
    "connection reset",
    "connection was",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process",
    "failed to recv",
)


@dataclass(frozen=True)
class Place:
    """Where a process runs; process ids mean something within one `namespace` of one `host`."""

    host: str
    namespace: str
    pid: int

    @classmethod
    def here(cls) -> Place:
        return cls(socket.gethostname(), os.readlink("/proc/self/ns/pid"), os.getpid())

    def ended(self, here: Place) -> bool:
        """Whether it has ended for certain: False for a process of another machine."""
        if (self.host, self.namespace) != (here.host, here.namespace):
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True


@contextmanager
def ending_together(world: World, stop: Stop) -> Iterator[None]:
    """Inside a process group: an error that all have is printed by one; one that a single process has, by that one.

    Where a peer has ended, this process says which, and ends at once: what waits for a device cannot be taken down.
    """
    if world.world_size == 1:
        yield
        return
    store = dist.PrefixStore("bigdit", dist.distributed_c10d._get_default_store())
    places: list[Place] = []  # known when all have told theirs: one may be lost before
    try:
        found = [Place.here()] * world.world_size
        dist.all_gather_object(found, Place.here())
        places = found
        yield
    except UserError as error:
        for problem in error.problems:
            if _first(store, problem, world.is_main):
                print(f"error: {problem}", file=sys.stderr)
        _ended(store, world)
        raise UserError() from error
    except RuntimeError as error:
        if not any(sign in str(error).lower() for sign in SIGNS):
            _ended(store, world)
            raise
        gone = _gone(places)
        if not any(_has_said(store, rank) for rank in gone) and _first(store, "a peer", True):
            print(f"error: {_line(gone, places, world, stop.step, error)}", file=sys.stderr)
        _ended(store, world)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_USER)
    except Exception:
        _ended(store, world)
        raise


def _line(gone: list[int], places: list[Place], world: World, step: int, error: Exception) -> str:
    names = ", ".join(f"rank {rank} (process {places[rank].pid} on {places[rank].host})" for rank in gone)
    if not gone:
        found = (str(error).splitlines() or [type(error).__name__])[0][:200]
        names = f"of {world.world_size} processes one on another machine, or one that does not answer ({found}),"
    return f"{names} was lost after step {step}: all end; the same command goes on from the last checkpoint"


def _gone(places: list[Place]) -> list[int]:
    """The ranks of this machine that have ended."""
    here, deadline = Place.here(), time.monotonic() + PATIENCE_S
    while True:
        gone = [rank for rank, place in enumerate(places) if place.ended(here)]
        if gone or not places or time.monotonic() > deadline:
            return gone
        time.sleep(0.05)


def _first(store: dist.Store, what: str, alone: bool) -> bool:
    """Whether this process is the first to say it; `alone` where the store has ended with its process."""
    try:
        return store.add(f"said/{what}", 1) == 1
    except RuntimeError:
        return alone


def _ended(store: dist.Store, world: World) -> None:
    """Leave word that this process has said why it ends."""
    with suppress(RuntimeError):
        store.set(f"ended/{world.rank}", "")


def _has_said(store: dist.Store, rank: int) -> bool:
    try:
        return bool(store.check([f"ended/{rank}"]))
    except RuntimeError:
        return False
