"""Seconds by rank: of a step, of waiting for data, and of collectives, in which fast ranks wait for slow ones.

A rank's own time is its step without the collectives, plus the collectives of the rank that spends least in them.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bigdit.emulator import on_emulated_gpu

_NAMES = (
    *("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "all_gather_single", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
)
"""torch.distributed's functions that engines call, in all supported versions."""

SLOWER = 1.1
STEPS = 50
"""A rank is slow if its own time is this many times the others' median in all of the last 50 steps."""


class Collectives:
    """Times collectives: by the clock on a CPU, by events on a GPU's stream.

    On a CPU an asynchronous one counts only until it is queued. Those of context parallelism are not counted. Enter it
    before the engine is made, which keeps references to these functions.
    """

    def __init__(self) -> None:
        self.counting = True
        self._seconds = 0.0
        self._running: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._on_gpu = torch.cuda.is_available() and not on_emulated_gpu()
        self._before: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Collectives:
        self._before = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}
        for name, function in self._before.items():
            setattr(dist, name, self._timed(function))
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*values: Any, **options: Any) -> Any:
            if not self.counting:
                return function(*values, **options)
            if self._on_gpu and any(
                isinstance(each, torch.Tensor) and each.is_cuda for each in values + tuple(options.values())
            ):
                new = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                began, ended = self._free.pop() if self._free else new
                began.record()
                done = function(*values, **options)
                ended.record()
                self._running.append((began, ended))
                return done
            began_s = time.perf_counter()
            done = function(*values, **options)
            self._seconds += time.perf_counter() - began_s
            return done

        return timed

    def settle(self) -> None:
        """Count what the GPU has finished; called after each step."""
        left = []
        for began, ended in self._running:
            if ended.query():
                self._seconds += began.elapsed_time(ended) / 1000
                self._free.append((began, ended))
            else:
                left.append((began, ended))
        self._running = left

    def take(self) -> float:
        """The seconds since the last call."""
        self.settle()
        taken, self._seconds = self._seconds, 0.0
        return taken


class RankSeconds(NamedTuple):
    """A rank's seconds per step, and how many of them it waits for data and is in collectives."""

    host: str
    step: float
    data: float
    collectives: float


class SlowRanks:
    """Finds ranks that were slow in each window of the last 50 steps."""

    def __init__(self) -> None:
        self._windows: deque[tuple[int, set[int]]] = deque()
        self._named: set[int] = set()
        self.now: set[int] = set()

    def add(self, steps: int, found: Sequence[RankSeconds]) -> list[str]:
        """Add a window of `steps` steps, by rank. Returns a message for each rank that became slow."""
        least = min(each.collectives for each in found)
        own = [each.step - (each.collectives - least) for each in found]
        others = [statistics.median(own[:rank] + own[rank + 1 :]) for rank in range(len(own))]
        slow = {rank for rank in range(len(own)) if own[rank] > SLOWER * others[rank]}
        self._windows.append((steps, slow))
        while sum(count for count, _ in self._windows) - self._windows[0][0] >= STEPS:
            self._windows.popleft()
        whole = sum(count for count, _ in self._windows) >= STEPS
        self.now = set.intersection(*(each for _, each in self._windows)) if whole else set()
        new, self._named = sorted(self.now - self._named), self.now
        return [
            f"rank {rank} on {found[rank].host} is slow: its own time of a step is {own[rank]:.3g} s, "
            f"{found[rank].data:.2g} s of it waiting for data, and the others' median {others[rank]:.3g} s, more than "
            f"{SLOWER - 1:.0%} less in all of the last {STEPS} steps"
            for rank in new
        ]
