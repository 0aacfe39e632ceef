"""CogView4: one sequence of text and image, conditioned on the picture's size; padded text is attended to.

Source: diffusers' CogView4Transformer2DModel and CogView4Pipeline (Zheng et al., arXiv:2403.05121, for the sizes).
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.conditions import Conditions
from bigdit.models.family import Family

TIMESTEP_SCALE = 1000.0
# Pixels a latent: sizes are told in pixels.
DOWNSAMPLE = 8


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D]; pictures are whole, uncropped."""
    batch, _, height, width = latents.shape
    pixels = torch.tensor([[height * DOWNSAMPLE, width * DOWNSAMPLE]], dtype=latents.dtype)
    size = pixels.to(latents.device, non_blocking=True).repeat(batch, 1)
    return model(
        hidden_states=latents,
        encoder_hidden_states=conditions.text_embeds,
        timestep=t * TIMESTEP_SCALE,
        original_size=size,
        target_size=size,
        crop_coords=torch.zeros_like(size),
        return_dict=False,
    )[0]


FAMILY = Family("CogView4Transformer2DModel", predict)
