"""Z-Image: text and image are refined apart, then run as one sequence through single-stream blocks.

Its samples are lists: captions come without their padding, and grow to a multiple of 32 tokens inside.

Source: Z-Image team, arXiv:2511.22699; diffusers' ZImageTransformer2DModel and ZImagePipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T]."""
    embeds, mask = text(conditions)
    images = model(
        list(latents.unsqueeze(2).unbind()),
        1.0 - t,  # 1 = image, and the velocity points there
        [caption[words] for caption, words in zip(embeds, mask.bool(), strict=True)],
        return_dict=False,
    )[0]
    return -torch.stack(images).squeeze(2)


FAMILY = Family("ZImageTransformer2DModel", predict, lists=("noise_refiner", "context_refiner", "layers"))
