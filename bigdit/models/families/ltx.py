"""LTX-Video: one token for each latent of a strongly compressing VAE, self-attention, cross-attention to text.

Source: HaCohen et al., arXiv:2501.00103; diffusers' LTXVideoTransformer3DModel and LTXPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family

TIMESTEP_SCALE = 1000.0
# Rotary positions are in seconds and pixels: the VAE's 8 frames and 32 × 32 pixels a latent, at 25 frames a second.
POSITION_SCALE = (8 / 25, 32, 32)


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T]."""
    _, _, frames, height, width = latents.shape
    tokens = model(
        hidden_states=latents.flatten(2).transpose(1, 2),
        encoder_hidden_states=conditions.text_embeds,
        timestep=t * TIMESTEP_SCALE,
        encoder_attention_mask=conditions.text_mask,
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=POSITION_SCALE,
        return_dict=False,
    )[0]
    return tokens.transpose(1, 2).unflatten(2, (frames, height, width))


FAMILY = Family("LTXVideoTransformer3DModel", predict)
