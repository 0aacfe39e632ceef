"""Encode a micro-batch on the device, just before it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from bigdit.encoders.codecs import Encoded
from bigdit.loader.batch import Batch, CaptionedBatch, RawBatch

Encode = Callable[[Any, torch.dtype], Batch]
"""Features of a micro-batch that has none yet, with its conditions in a dtype."""


class Encodes(Protocol):
    """A run's encoders, or those of an attempt: what a chunk of their micro-batches has becomes features."""

    @property
    def encode(self) -> Callable[..., Encoded]: ...


def encode(encoders: Encodes, chunk: int | None, batch: RawBatch | CaptionedBatch, compute_dtype: torch.dtype) -> Batch:
    """The features of a batch on the encoders' device, conditions in `compute_dtype`, `chunk` samples at a time.

    Without a chunk, all at once.
    """
    parts = [encoders.encode(*chunked) for chunked in batch.chunks(chunk)]
    texts = [part.text_embeds for part in parts if part.text_embeds is not None]
    masks = [part.text_mask for part in parts if part.text_mask is not None]
    given = {name: _whole([part.extras[name] for part in parts]) for name in parts[0].extras}
    encoded = Batch(
        latents=_whole([part.latents for part in parts]),
        text_embeds=_whole(texts) if texts else None,
        text_mask=_whole(masks) if masks else None,
        seeds=batch.seeds,
        extras={**batch.extras, **given},
    )
    return encoded.to(encoded.latents.device, compute_dtype)


def _whole(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
