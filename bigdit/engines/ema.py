"""An exponential moving average of the weights, sharded as an engine's masters are (Polyak & Juditsky, 1992)."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from bigdit.engines.protocol import Engine
from bigdit.spec import EmaSpec
from bigdit.units import MIB

# What is copied at once where weights and average are apart; on the host it is pinned, and stays.
CHUNK_ELEMENTS = 64 * MIB // 4


class Ema:
    """average = decay × average + (1 − decay) × weights, in fp32, of this process's masters.

    `averages` are in the order of `engine.masters` and have their local shapes. On the host they wait in plain
    memory: the weights come there a chunk at a time, through one pinned buffer, and the host's cores average.
    """

    def __init__(self, spec: EmaSpec, engine: Engine) -> None:
        self._weight = 1.0 - spec.decay
        self._engine = engine
        self._device = engine.device if spec.device == "gpu" else torch.device("cpu")
        self.averages = [
            torch.empty_like(weights, dtype=torch.float32, device=self._device).copy_(weights)
            for weights in self._weights()
        ]
        self._chunk: torch.Tensor | None = None
        if spec.device == "cpu" and engine.device.type != "cpu":
            longest = max(map(torch.numel, self.averages), default=0)
            self._chunk = torch.empty(min(longest, CHUNK_ELEMENTS), pin_memory=True)

    def tensors(self) -> list[torch.Tensor]:
        """All that is held for it, on the device and on the host."""
        return self.averages if self._chunk is None else [*self.averages, self._chunk]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights in as they are now: to be called after each optimizer step."""
        for average, weights in zip(self.averages, self._weights(), strict=True):
            if weights.device == self._device and weights.dtype == torch.float32:
                average.lerp_(weights, self._weight)
                continue
            chunks = zip(average.view(-1).split(CHUNK_ELEMENTS), weights.view(-1).split(CHUNK_ELEMENTS), strict=True)
            for part, new in chunks:
                part.lerp_(self._brought(new), self._weight)

    def _brought(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights in fp32 where the averages are."""
        if self._chunk is None or weights.device == self._device:
            return weights.to(self._device, torch.float32)
        return self._chunk[: weights.numel()].copy_(weights)

    @torch.no_grad()
    def _weights(self) -> list[torch.Tensor]:
        return [m.to_local() if isinstance(m, DTensor) else m.detach() for m in self._engine.masters]


def ema_of(engine: Engine) -> Ema | None:
    """The moving average that the engine's strategy asks for, starting at the weights as they are now."""
    spec = engine.strategy.ema
    return None if spec is None else Ema(spec, engine)
