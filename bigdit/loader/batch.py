"""Micro-batches of a training step: features, images with token ids, or images with captions; and reading ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one bucket.

    latents [B, C, H, W] (or [B, C, F, H, W] of videos) as stored, fp32 on the device; text_embeds [B, T, D] and
    text_mask [B, T], 1 = token, 0 = padding, None without text; `extras` [B, …] by name, a family's further inputs.
    `seeds`: one for each sample. All randomness of a step comes from them, so the noise does not depend on how the
    global batch is split over processes.
    """

    latents: torch.Tensor
    text_embeds: torch.Tensor | None
    text_mask: torch.Tensor | None
    seeds: tuple[int, ...]
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors."""
        some = (self.latents, self.text_embeds, self.text_mask, *self.extras.values())
        return [tensor for tensor in some if tensor is not None]

    def pin_memory(self) -> Batch:
        """A copy in pinned memory, from which copies to a GPU overlap with its work."""
        return Batch(
            self.latents.pin_memory(),
            None if self.text_embeds is None else self.text_embeds.pin_memory(),
            None if self.text_mask is None else self.text_mask.pin_memory(),
            self.seeds,
            {name: tensor.pin_memory() for name, tensor in self.extras.items()},
        )

    def to(self, device: torch.device, compute_dtype: torch.dtype) -> Batch:
        """The batch on `device`, conditions in `compute_dtype`. The copy overlaps if memory is pinned."""
        return Batch(
            self.latents.to(device, non_blocking=True).float(),  # widened there: fewer bytes are read and sent
            None if self.text_embeds is None else condition(self.text_embeds, device, compute_dtype),
            None if self.text_mask is None else condition(self.text_mask, device, compute_dtype),
            self.seeds,
            {name: condition(tensor, device, compute_dtype) for name, tensor in self.extras.items()},
        )


def condition(tensor: torch.Tensor, device: torch.device, compute_dtype: torch.dtype) -> torch.Tensor:
    """A condition on `device`: floats in `compute_dtype`. The copy may overlap."""
    dtype = compute_dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device, dtype, non_blocking=True)


Tokens = tuple[torch.Tensor, torch.Tensor]
"""Token ids and their mask (1 = token, 0 = padding), both [B, T] int64."""


@dataclass(frozen=True)
class RawBatch:
    """One micro-batch of one bucket, not encoded yet.

    pixels [B, 3, H, W] (or [B, 3, F, H, W] of videos) uint8; `tokens` of each text encoder in order; `extras` [B, …] by
    name, inputs that no encoder makes; seeds as in Batch.
    """

    pixels: torch.Tensor
    tokens: tuple[Tokens, ...]
    seeds: tuple[int, ...]
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors."""
        return [self.pixels, *(tensor for pair in self.tokens for tensor in pair), *self.extras.values()]

    def pin_memory(self) -> RawBatch:
        """A copy in pinned memory, from which copies to a GPU overlap with its work."""
        return RawBatch(
            self.pixels.pin_memory(),
            tuple((ids.pin_memory(), mask.pin_memory()) for ids, mask in self.tokens),
            self.seeds,
            {name: tensor.pin_memory() for name, tensor in self.extras.items()},
        )

    def to(self, device: torch.device, compute_dtype: torch.dtype) -> RawBatch:
        """The batch on `device`, extras in `compute_dtype`. The copy overlaps if memory is pinned."""
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


Captions = Sequence[str | None]
"""The caption of each sample; None if it is dropped, for classifier-free guidance."""


@dataclass(frozen=True)
class CaptionedBatch:
    """One micro-batch of one bucket, not encoded yet.

    pixels [B, 1 or 3, (F,) H, W] uint8; a caption for each sample, none if images have classes; the samples' `indices`
    in the source; seeds and `extras` as in Batch.
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
        """The batch on `device`, extras in `compute_dtype`. The copy overlaps if memory is pinned."""
        extras = {name: condition(tensor, device, compute_dtype) for name, tensor in self.extras.items()}
        pixels = self.pixels.to(device, non_blocking=True)
        return CaptionedBatch(pixels, self.captions, self.indices, self.seeds, extras)

    def chunks(self, size: int | None) -> Iterator[tuple[torch.Tensor, Captions, Sequence[int]]]:
        """Pixels, captions and indices, `size` samples at a time; None: all at once."""
        count = len(self.seeds)
        for start in range(0, count, size or count):
            rows = slice(start, start + (size or count))
            yield self.pixels[rows], self.captions[rows], self.indices[rows]


T = TypeVar("T")


def read_ahead(read: Callable[[int], T], steps: Iterable[int], ahead: int, reader: Executor) -> Iterator[T]:
    """`read(step)` of each step, in order. `reader` reads the next `ahead` steps before one is returned.

    So `ahead` + 1 steps exist at once, if the caller drops each before the next.
    """
    queue: deque[Future[T]] = deque()
    for step in steps:
        queue.append(reader.submit(read, step))
        if len(queue) > ahead:
            yield queue.popleft().result()
    while queue:
        yield queue.popleft().result()
