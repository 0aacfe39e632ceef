"""Micro-batches of a training step: features, images with token ids, or images with captions; and reading ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import torch


class _Tensors:
    """Methods of all batches, which are dataclasses of tensors, and of tuples and mappings of tensors."""

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors."""
        found: list[torch.Tensor] = []

        def add(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        self._mapped(add)
        return found

    def pin_memory(self) -> Self:
        """A copy in pinned memory, from which copies to a GPU overlap with its work."""
        return self._mapped(torch.Tensor.pin_memory)

    def to(self, device: torch.device, compute_dtype: torch.dtype) -> Self:
        """The batch on `device`, floats in `compute_dtype`. The copy overlaps if memory is pinned."""
        return self._mapped(lambda tensor: condition(tensor, device, compute_dtype))

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor], but: str = "") -> Self:
        def each(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return function(value)
            if isinstance(value, Mapping):
                return {name: each(inner) for name, inner in value.items()}
            return tuple(map(each, value)) if isinstance(value, tuple) else value

        # mypy does not see that Self is a dataclass here.
        names = [one.name for one in fields(self) if one.name != but]  # type: ignore[arg-type]
        return replace(self, **{name: each(getattr(self, name)) for name in names})  # type: ignore[type-var]


def condition(tensor: torch.Tensor, device: torch.device, compute_dtype: torch.dtype) -> torch.Tensor:
    """A condition on `device`: floats in `compute_dtype`. The copy may overlap."""
    dtype = compute_dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device, dtype, non_blocking=True)


@dataclass(frozen=True)
class Batch(_Tensors):
    """One micro-batch of one bucket.

    latents [B, C, H, W] ([B, C, F, H, W] of videos) as stored, fp32 on the device. text_embeds [B, T, D] and text_mask
    [B, T], 1 = token, 0 = padding; None without text. `extras` [B, …] by name: further inputs of the family. `seeds`:
    one for each sample. All randomness of a step comes from them, so the noise does not depend on how the global batch
    is split over processes.
    """

    latents: torch.Tensor
    text_embeds: torch.Tensor | None
    text_mask: torch.Tensor | None
    seeds: tuple[int, ...]
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def to(self, device: torch.device, compute_dtype: torch.dtype) -> Batch:
        """The batch on `device`, conditions in `compute_dtype`. The copy overlaps if memory is pinned."""
        latents = self.latents.to(device, non_blocking=True).float()  # converted there, so fewer bytes are copied
        rest = self._mapped(lambda each: condition(each, device, compute_dtype), but="latents")
        return replace(rest, latents=latents)


Tokens = tuple[torch.Tensor, torch.Tensor]
"""Token ids and their mask (1 = token, 0 = padding), both [B, T] int64."""


@dataclass(frozen=True)
class RawBatch(_Tensors):
    """One micro-batch of one bucket, not encoded yet.

    pixels [B, 3, H, W] ([B, 3, F, H, W] of videos) uint8. `tokens`: of each text encoder, in order. `extras` [B, …] by
    name: inputs that no encoder makes. seeds as in Batch.
    """

    pixels: torch.Tensor
    tokens: tuple[Tokens, ...]
    seeds: tuple[int, ...]
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def chunks(self, size: int | None) -> Iterator[tuple[torch.Tensor, list[Tokens]]]:
        """Pixels and tokens, `size` samples at a time; None: all at once."""
        for rows in _chunks(len(self.seeds), size):
            yield self.pixels[rows], [(ids[rows], mask[rows]) for ids, mask in self.tokens]


Captions = Sequence[str | None]
"""The caption of each sample; None if it is dropped, for classifier-free guidance."""


@dataclass(frozen=True)
class CaptionedBatch(_Tensors):
    """One micro-batch of one bucket, not encoded yet.

    pixels [B, 1 or 3, (F,) H, W] uint8. `captions`: one for each sample; empty if images have classes. `indices`: of
    the samples in the source. seeds and `extras` as in Batch. `skipped`: for each sample a message if it replaces an
    unusable one, else None.
    """

    pixels: torch.Tensor
    captions: Captions
    indices: tuple[int, ...]
    seeds: tuple[int, ...]
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    skipped: tuple[str | None, ...] = ()

    def chunks(self, size: int | None) -> Iterator[tuple[torch.Tensor, Captions, Sequence[int]]]:
        """Pixels, captions and indices, `size` samples at a time; None: all at once."""
        for rows in _chunks(len(self.seeds), size):
            yield self.pixels[rows], self.captions[rows], self.indices[rows]


def _chunks(count: int, size: int | None) -> Iterator[slice]:
    for start in range(0, count, size or count):
        yield slice(start, start + (size or count))


T = TypeVar("T")


def read_ahead(read: Callable[[int], T], steps: Iterable[int], ahead: int, reader: Executor) -> Iterator[T]:
    """`read(step)` of each step, in order. `reader` reads the next `ahead` steps before a step is returned.

    So `ahead` + 1 steps exist at once, if the caller drops each step before it takes the next.
    """
    queue: deque[Future[T]] = deque()
    for step in steps:
        queue.append(reader.submit(read, step))
        if len(queue) > ahead:
            yield queue.popleft().result()
    while queue:
        yield queue.popleft().result()
