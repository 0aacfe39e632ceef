"""What encoders make of a micro-batch on the device that trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Encoded:
    """latents [B, C, (F,) h, w] fp32; in the encoders' dtype text_embeds [B, T, D], text_mask [B, T] and the extras."""

    latents: torch.Tensor
    text_embeds: torch.Tensor | None
    text_mask: torch.Tensor | None
    extras: dict[str, torch.Tensor]
