"""Encode images to latents and captions to texts: VAEs, text encoders, batch sizes. The same for cached and online.

`sources` reads images and captions, `store` holds the results. Only this layer imports transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EncodedBatch:
    """An encoded micro-batch: latents [B, C, (F,) h, w] fp32; in the encoders' dtype text_embeds [B, T, D], text_mask
    [B, T] and the extras."""

    latents: torch.Tensor
    text_embeds: torch.Tensor | None
    text_mask: torch.Tensor | None
    extras: dict[str, torch.Tensor]
