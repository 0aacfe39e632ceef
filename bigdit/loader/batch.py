"""What a training step is fed."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one bucket.

    latents [B, C, H, W] fp32; text_embeds [B, T, D]; text_mask [B, T], 1 = token, 0 = padding; one seed a
    sample: all randomness of a step comes from them, so that any split of the global batch over processes
    draws the same noise.
    """

    latents: torch.Tensor
    text_embeds: torch.Tensor
    text_mask: torch.Tensor
    seeds: tuple[int, ...]

    def to(self, device: torch.device, compute_dtype: torch.dtype) -> Batch:
        """The batch on `device`, text in `compute_dtype`; the copy overlaps where the host is pinned."""
        return Batch(
            self.latents.to(device, non_blocking=True),
            self.text_embeds.to(device, compute_dtype, non_blocking=True),
            self.text_mask.to(device, compute_dtype, non_blocking=True),
            self.seeds,
        )
