"""What a training step is fed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one bucket.

    latents [B, C, H, W] (or [B, C, F, H, W] of videos) as stored, fp32 on the device; text_embeds [B, T, D] and
    text_mask [B, T], 1 = token, 0 = padding, None without text; `extras` [B, …] by name, what a family wants beside
    them; one seed a sample: all randomness of a step comes from them, so that any split of the global batch over
    processes draws the same noise.
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
        """A copy in page-locked memory, from which copies to a GPU overlap with its work."""
        return Batch(
            self.latents.pin_memory(),
            None if self.text_embeds is None else self.text_embeds.pin_memory(),
            None if self.text_mask is None else self.text_mask.pin_memory(),
            self.seeds,
            {name: tensor.pin_memory() for name, tensor in self.extras.items()},
        )

    def to(self, device: torch.device, compute_dtype: torch.dtype) -> Batch:
        """The batch on `device`, conditions in `compute_dtype`; the copy overlaps where the host is pinned."""
        return Batch(
            self.latents.to(device, non_blocking=True).float(),  # widened there: fewer bytes are read and sent
            None if self.text_embeds is None else condition(self.text_embeds, device, compute_dtype),
            None if self.text_mask is None else condition(self.text_mask, device, compute_dtype),
            self.seeds,
            {name: condition(tensor, device, compute_dtype) for name, tensor in self.extras.items()},
        )


def condition(tensor: torch.Tensor, device: torch.device, compute_dtype: torch.dtype) -> torch.Tensor:
    """What a model is conditioned on, on `device`: floats in `compute_dtype`, in a copy that may overlap."""
    dtype = compute_dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device, dtype, non_blocking=True)
