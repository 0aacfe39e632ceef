"""What a training step is fed where it encodes for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from bigdit.loader.batch import condition

Tokens = tuple[torch.Tensor, torch.Tensor]
"""Token ids and their mask (1 = token, 0 = padding), both [B, T] int64."""


@dataclass(frozen=True)
class RawBatch:
    """One micro-batch of one bucket, not encoded yet.

    pixels [B, 3, H, W] (or [B, 3, F, H, W] of videos) uint8; `tokens` of each text encoder in its order; `extras`
    [B, …] by name, what a family wants and no encoder gives; one seed a sample, as in Batch.
    """

    pixels: torch.Tensor
    tokens: tuple[Tokens, ...]
    seeds: tuple[int, ...]
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors."""
        return [self.pixels, *(tensor for pair in self.tokens for tensor in pair), *self.extras.values()]

    def pin_memory(self) -> RawBatch:
        """A copy in page-locked memory, from which copies to a GPU overlap with its work."""
        return RawBatch(
            self.pixels.pin_memory(),
            tuple((ids.pin_memory(), mask.pin_memory()) for ids, mask in self.tokens),
            self.seeds,
            {name: tensor.pin_memory() for name, tensor in self.extras.items()},
        )

    def to(self, device: torch.device, compute_dtype: torch.dtype) -> RawBatch:
        """The batch on `device`, extras in `compute_dtype`; the copy overlaps where the host is pinned."""
        return RawBatch(
            self.pixels.to(device, non_blocking=True),
            tuple((ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)) for ids, mask in self.tokens),
            self.seeds,
            {name: condition(tensor, device, compute_dtype) for name, tensor in self.extras.items()},
        )

    def chunks(self, size: int | None) -> Iterator[tuple[torch.Tensor, list[Tokens]]]:
        """Pixels and tokens, `size` samples at a time; None: all at once."""
        count = len(self.seeds)
        for start in range(0, count, size or count):
            rows = slice(start, start + (size or count))
            yield self.pixels[rows], [(ids[rows], mask[rows]) for ids, mask in self.tokens]
