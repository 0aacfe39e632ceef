"""What a training step is fed where it encodes pictures and captions of a run's own sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bigdit.loader.batch import condition

Captions = Sequence[str | None]
"""Of each sample; None: it is dropped, for classifier-free guidance."""


@dataclass(frozen=True)
class CaptionedBatch:
    """One micro-batch of one bucket, not encoded yet.

    pixels [B, 1 or 3, (F,) H, W] uint8; a caption a sample, of pictures that have classes none at all; the samples'
    `indices` in the source; seeds and `extras` as in Batch.
    """

    pixels: torch.Tensor
    captions: Captions
    indices: tuple[int, ...]
    seeds: tuple[int, ...]
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors."""
        return [self.pixels, *self.extras.values()]

    def to(self, device: torch.device, compute_dtype: torch.dtype) -> CaptionedBatch:
        """The batch on `device`, extras in `compute_dtype`; the copy overlaps where the host is pinned."""
        extras = {name: condition(tensor, device, compute_dtype) for name, tensor in self.extras.items()}
        pixels = self.pixels.to(device, non_blocking=True)
        return CaptionedBatch(pixels, self.captions, self.indices, self.seeds, extras)

    def chunks(self, size: int | None) -> Iterator[tuple[torch.Tensor, Captions, Sequence[int]]]:
        """Pixels, captions and indices, `size` samples at a time; None: all at once."""
        count = len(self.seeds)
        for start in range(0, count, size or count):
            rows = slice(start, start + (size or count))
            yield self.pixels[rows], self.captions[rows], self.indices[rows]
