"""What ends a group of processes is said once, in a line, by the first that knows; and then all end."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from bigdit.die_with_parent import ENDED, STOPPED, state_of
from bigdit.dist import World
from bigdit.errors import EXIT_USER, UserError, refused
from bigdit.train.processes.stop import Stop

# How long a process may take to end, or to say that it lost a peer too, after another's connections broke.
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

    def state(self, here: Place) -> str:
        """The process's `state_of`, or nothing for one of another machine."""
        return state_of(self.pid) if (self.host, self.namespace) == (here.host, here.namespace) else ""


@contextmanager
def ending_together(world: World, stop: Stop, timeout: float) -> Iterator[None]:
    """Inside a process group: an error that all have is printed by one; one that a single process has, by that one.

    Where a peer has ended, or has not answered for `timeout` seconds, this process says which, and ends at once: what
    waits for a device cannot be taken down.
    """
    if world.world_size == 1:
        yield
        return
    store = _Store(dist.PrefixStore("bigdit", dist.distributed_c10d._get_default_store()))
    places: list[Place] = []  # known when all have told theirs: one may be lost before
    try:
        found = [Place.here()] * world.world_size
        dist.all_gather_object(found, Place.here())
        places = found
        yield
    except Exception as error:
        problems = error.problems if isinstance(error, UserError) else tuple(filter(None, [refused(error)]))
        for problem in problems:
            if store.first(problem, world.is_main):
                _say(problem)
        store.leave_word(world.rank)
        if problems:
            raise UserError() from error
        if not isinstance(error, RuntimeError) or not any(sign in str(error).lower() for sign in SIGNS):
            raise
        gone = _gone(places)
        if not any(store.has_word(rank) for rank in gone) and store.first("a peer", True):
            lost = f"{_names(gone, places)} was lost" if gone else _silent(store, places, world, timeout, error)
            _say(f"{lost} after step {stop.step}: all end; the same command goes on from the last checkpoint")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_USER)


def _say(problem: str) -> None:
    print(f"error: {problem}", file=sys.stderr)


class _Store:
    """The store by which the processes meet. Its own process may be the one that has ended, or does not answer."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.answers = True

    def first(self, what: str, alone: bool) -> bool:
        """Whether this process is the first to say it; `alone` where the store does not answer."""
        return self._ask(lambda: bool(self._store.add(f"said/{what}", 1) == 1), alone)

    def leave_word(self, rank: int) -> None:
        """This process ends, and it or another one says why."""
        self._ask(lambda: bool(self._store.add(f"ended/{rank}", 1)), False)

    def has_word(self, rank: int) -> bool:
        """Whether that process has left its word."""
        return self._ask(lambda: bool(self._store.check([f"ended/{rank}"])), False)

    def _ask(self, question: Callable[[], bool], otherwise: bool) -> bool:
        """Its answer; a store that is not heard within the patience is not asked again, since torch sets no limit."""
        heard: list[bool] = []

        def ask() -> None:
            with suppress(RuntimeError):
                heard.append(question())

        if self.answers:
            asking = threading.Thread(target=ask, daemon=True)
            try:
                asking.start()
                asking.join(PATIENCE_S)
            except RuntimeError:  # the system starts no more threads
                ask()
            self.answers = bool(heard)
        return heard[0] if heard else otherwise


def _silent(store: _Store, places: list[Place], world: World, timeout: float, error: Exception) -> str:
    """Which ranks did not answer: those that are stopped, else those that do not say that they lost a peer too."""
    here = Place.here()
    silent = [rank for rank in range(len(places)) if not store.has_word(rank)]
    if not store.answers:  # rank 0 holds it, or a launcher does, which no rank can name
        silent = [0] if places and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ else []
    stopped = [rank for rank, place in enumerate(places) if place.state(here) in STOPPED]
    if stopped or silent:
        state = ", which is stopped," if stopped else ""
        return f"{_names(stopped or silent, places)}{state} did not answer for {timeout:g} s (train.timeout)"
    found = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return f"of {world.world_size} processes one on another machine, or one that does not answer ({found}), was lost"


def _names(ranks: list[int], places: list[Place]) -> str:
    return ", ".join(f"rank {rank} (process {places[rank].pid} on {places[rank].host})" for rank in ranks)


def _gone(places: list[Place]) -> list[int]:
    """The ranks of this machine that have ended."""
    here, deadline = Place.here(), time.monotonic() + PATIENCE_S
    while True:
        gone = [rank for rank, place in enumerate(places) if place.state(here) in ENDED]
        if gone or not places or time.monotonic() > deadline:
            return gone
        time.sleep(0.05)
