"""LTX-Video: one token for each latent of a strongly compressing VAE, self-attention, cross-attention to text.

A video that begins with an image has it as the first frame of latents, at t = 0.

Source: HaCohen et al., arXiv:2501.00103; diffusers' LTXVideoTransformer3DModel, LTXPipeline and
LTXImageToVideoPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.catalog.families import IMAGE_CONDITION
from bigdit.models.family import (
    Conditions,
    Extra,
    Family,
    arguments,
    given_first_frame,
    with_first_frame,
    with_known_velocity,
)

TIMESTEP_SCALE = 1000.0
# Rotary positions are in seconds and pixels: the VAE's 8 frames and 32 × 32 pixels a latent, at 25 frames a second.
POSITION_SCALE = (8 / 25, 32, 32)


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T].

    The extra image_condition, of the shape of `latents`, has a given first frame, whose velocity is known.
    """
    _, _, frames, height, width = latents.shape
    given = given_first_frame(latents, conditions)
    shown, times = (latents, t) if given is None else with_first_frame(latents, t, given, height * width)
    tokens = model(
        hidden_states=shown.flatten(2).transpose(1, 2),
        encoder_hidden_states=conditions.text_embeds,
        timestep=times * TIMESTEP_SCALE,
        encoder_attention_mask=conditions.text_mask,
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=POSITION_SCALE,
        return_dict=False,
    )[0]
    velocity = tokens.transpose(1, 2).unflatten(2, (frames, height, width))
    return velocity if given is None else with_known_velocity(velocity, latents, t, given)


def first(model: nn.Module) -> dict[str, Extra]:
    """Image to video: `image_condition`, the latents of the first frame, and zeros."""
    return {IMAGE_CONDITION: Extra((arguments(model).in_channels,), per_latent=True)}


FAMILY = Family("LTXVideoTransformer3DModel", predict, first=first)
