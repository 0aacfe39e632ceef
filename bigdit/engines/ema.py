"""Moving averages of the weights (EMA), sharded like an engine's masters (Polyak & Juditsky, 1992)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch

from bigdit.engines.protocol import Engine
from bigdit.optim.factored import local
from bigdit.strategy import EmaSpec
from bigdit.units import MIB

# The size of the pinned buffer through which weights are copied to an EMA on another device.
CHUNK_ELEMENTS = 64 * MIB // 4

_Pair: TypeAlias = tuple[Sequence[torch.Tensor], torch.Tensor]
"""A tensor of each average, and the weights that update it."""


@functools.cache
def exponent(width: float) -> float:
    """γ of the power function t^γ with this width, a share of all t.

    Source: Karras et al., arXiv:2312.02696, §3.1: σ_rel² = (γ + 1) / ((γ + 2)² (γ + 3)); γ is the largest root.
    """
    return float(np.roots([1, 7, 16 - width**-2, 12 - width**-2]).real.max())


def shares_of_new(spec: EmaSpec, update: int) -> list[float]:
    """The share of the new weights in each average at update number `update` (from 1): 1 - β.

    Source: Karras et al., §3.1: β_γ(t) = (1 − 1/t)^(γ + 1). With a decay, β is at most (1 + t) / (10 + t), as in
    TensorFlow's ExponentialMovingAverage with num_updates: otherwise a short run's average stays near its start.
    """
    if spec.decay is not None:
        return [1.0 - min(spec.decay, (1 + update) / (10 + update))]
    return [1.0 - (1.0 - 1.0 / update) ** (exponent(width) + 1.0) for width in spec.powers]


class Ema:
    """average = (1 − share) × average + share × weights, in fp32, of this process's masters; see `shares_of_new`.

    `updates`: the number of updates, which sets the share. `every`: each average, as tensors in the order and local
    shapes of `engine.masters`. With device cpu they are in pageable memory: weights are copied a chunk at a time
    through one pinned buffer, and the CPU averages.
    """

    def __init__(self, spec: EmaSpec, engine: Engine) -> None:
        self.spec = spec
        self.updates = 0
        self._engine = engine
        self._device = engine.device if spec.device == "gpu" else torch.device("cpu")
        self.every = [
            [
                torch.empty_like(weights, dtype=torch.float32, device=self._device).copy_(weights)
                for weights in self._weights()
            ]
            for _ in range(spec.count)
        ]
        self._chunk: torch.Tensor | None = None
        if spec.device == "cpu" and engine.device.type != "cpu":
            longest = max(map(torch.numel, self.averages), default=0)
            self._chunk = torch.empty(min(longest, CHUNK_ELEMENTS), pin_memory=True)

    @property
    def averages(self) -> list[torch.Tensor]:
        """The first average, which `in_place` uses."""
        return self.every[0]

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors, on the device and in CPU memory."""
        held = [average for averages in self.every for average in averages]
        return held if self._chunk is None else [*held, self._chunk]

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current weights; called after each optimizer step."""
        self.updates += 1
        shares = shares_of_new(self.spec, self.updates)
        direct, copied = list[_Pair](), list[_Pair]()
        for *averages, weights in zip(*self.every, self._weights(), strict=True):
            same = weights.device == self._device and weights.dtype == torch.float32
            (direct if same else copied).append((averages, weights))
        if direct:
            _update(direct, shares)
        for parts in self._copies(copied):
            _update(parts, shares)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the weights are their average; all processes call this. Swapping back restores them to the bit.

        An error inside ends the run, and leaves them swapped.
        """
        self._exchange()
        yield
        self._exchange(back=True)

    @torch.no_grad()
    def _exchange(self, *, back: bool = False) -> None:
        for average, weights in zip(self.averages, self._weights(), strict=True):
            chunks = zip(average.view(-1).split(CHUNK_ELEMENTS), weights.view(-1).split(CHUNK_ELEMENTS), strict=True)
            for part, other in chunks:
                if other.dtype == torch.float32:
                    _swap(part, other)
                else:
                    _swap_rounded(part, other, back=back)
        self._engine.publish()

    def _copies(self, pairs: list[_Pair]) -> Iterator[list[_Pair]]:
        """Chunks of averages with their weights, which are copied in fp32 to the averages' device.

        Each list has one chunk, or as many as fit into the pinned buffer, and waits for the device once.
        """
        waiting, filled = list[_Pair](), 0
        for averages, weights in pairs:
            for *parts, new in zip(
                *(each.view(-1).split(CHUNK_ELEMENTS) for each in (*averages, weights)), strict=True
            ):
                if self._chunk is None or new.device == self._device:
                    yield [(parts, new.to(self._device, torch.float32))]
                    continue
                if filled + new.numel() > self._chunk.numel():
                    torch.accelerator.current_stream(new.device).synchronize()
                    yield waiting
                    waiting, filled = [], 0
                there = self._chunk[filled : filled + new.numel()]
                waiting.append((parts, there.copy_(new, non_blocking=True)))
                filled += new.numel()
        if waiting:
            torch.accelerator.current_stream(self._engine.device).synchronize()
            yield waiting

    @torch.no_grad()
    def _weights(self) -> list[torch.Tensor]:
        return [local(master).detach() for master in self._engine.masters]


def _update(pairs: Sequence[_Pair], shares: Sequence[float]) -> None:
    for number, share in enumerate(shares):
        torch._foreach_lerp_([averages[number] for averages, _ in pairs], [new for _, new in pairs], share)


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the values of two tensors, on any devices."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _swap_rounded(average: torch.Tensor, weights: torch.Tensor, *, back: bool) -> None:
    """Swap bf16 weights with the upper halves of the fp32 average: bf16 is the upper half of fp32.

    Half a unit in the last place is added before and subtracted after. So values are rounded to the nearest, ties away
    from zero.
    """
    bits, half = average.view(torch.int32), 1 << 15
    if not back:
        bits.add_(half)
    _swap(bits.view(torch.int16)[1::2], weights.view(torch.int16))  # little-endian: upper half last
    if back:
        bits.sub_(half)


def ema_of(engine: Engine) -> Ema | None:
    """The EMA of the engine's strategy, if it has one, starting at the current weights."""
    spec = engine.strategy.ema
    return None if spec is None else Ema(spec, engine)
