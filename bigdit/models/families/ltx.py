"""LTX-Video: one token for each latent of a strongly compressing VAE, self-attention, cross-attention to text.

A video that begins with an image has this as its first frame of latents, at a t of 0.

Source: HaCohen et al., arXiv:2501.00103; diffusers' LTXVideoTransformer3DModel, LTXPipeline and
LTXImageToVideoPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.catalog.conditions import IMAGE_CONDITION
from bigdit.models.family import Conditions, Extra, Family, arguments

TIMESTEP_SCALE = 1000.0
# Rotary positions are in seconds and pixels: the VAE's 8 frames and 32 × 32 pixels a latent, at 25 frames a second.
POSITION_SCALE = (8 / 25, 32, 32)
LEAST_T = 1e-4


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T].

    Of a given first frame, in the extra image_condition as `latents`, the velocity is known: that which leads to it. An
    image, a video of one frame, is not given.
    """
    _, _, frames, height, width = latents.shape
    given = conditions.extras.get(IMAGE_CONDITION) if frames > 1 else None
    shown, times = latents, t * TIMESTEP_SCALE
    if given is not None:
        shown = torch.cat([given[:, :, :1], latents[:, :, 1:]], dim=2)
        moves = (torch.arange(frames * height * width, device=t.device) >= height * width).to(times.dtype)
        times = times[:, None] * moves
    tokens = model(
        hidden_states=shown.flatten(2).transpose(1, 2),
        encoder_hidden_states=conditions.text_embeds,
        timestep=times,
        encoder_attention_mask=conditions.text_mask,
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=POSITION_SCALE,
        return_dict=False,
    )[0]
    velocity = tokens.transpose(1, 2).unflatten(2, (frames, height, width))
    if given is None:
        return velocity
    known = (latents[:, :, :1] - given[:, :, :1]) / t.clamp(min=LEAST_T).view(-1, 1, 1, 1, 1)
    return torch.cat([known.to(velocity.dtype), velocity[:, :, 1:]], dim=2)


def first(model: nn.Module) -> dict[str, Extra]:
    """Image to video: `image_condition`, the latents of the first frame, and zeros."""
    return {IMAGE_CONDITION: Extra((arguments(model).in_channels,), per_latent=True)}


FAMILY = Family("LTXVideoTransformer3DModel", predict, first=first, keeps_first=True)
