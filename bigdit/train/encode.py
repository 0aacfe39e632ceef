"""Encode a micro-batch on the device, just before it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from bigdit.loader.batch import Batch
from bigdit.loader.raw import RawBatch

if TYPE_CHECKING:  # transformers takes seconds to import, and most steps encode nothing
    from bigdit.encoders.frozen import FrozenEncoders

Encode = Callable[[RawBatch, torch.dtype], Batch]


def encode(encoders: FrozenEncoders, chunk: int | None, batch: RawBatch, compute_dtype: torch.dtype) -> Batch:
    """The features of a batch on the encoders' device, conditions in `compute_dtype`, `chunk` samples at a time.

    Without a chunk, all at once.
    """
    parts = [encoders.encode(pixels, tokens) for pixels, tokens in batch.chunks(chunk)]
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
