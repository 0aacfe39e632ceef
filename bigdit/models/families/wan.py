"""Wan 2.1 and 2.2: self-attention over all of a video, cross-attention to text and, from an image, to its CLIP.

Wan 2.2's 5B has no channels for an image, and takes it as the first frame of latents, at t = 0.

Source: Wan team, arXiv:2503.20314; diffusers' WanTransformer3DModel, WanPipeline and WanImageToVideoPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.catalog.families import FAMILIES, IMAGE_CONDITION, IMAGE_EMBEDS
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


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, 512, D], zeros where padded.

    The extra image_condition has further channels with a mask. Without them it is the first frame of latents, whose
    velocity is known.
    """
    condition, given = conditions.extras.get(IMAGE_CONDITION), given_first_frame(latents, conditions)
    shown, times = latents, t
    if given is not None:
        patch = arguments(model).patch_size
        shown, times = with_first_frame(latents, t, given, latents[0, 0, 0].numel() // (patch[1] * patch[2]))
    elif condition is not None and condition.shape[1] > latents.shape[1]:
        shown = torch.cat([latents, condition], dim=1)
    velocity = model(
        hidden_states=shown,
        timestep=times * TIMESTEP_SCALE,
        encoder_hidden_states=conditions.text_embeds,
        encoder_hidden_states_image=conditions.extras.get(IMAGE_EMBEDS),
        return_dict=False,
    )[0]
    return velocity if given is None else with_known_velocity(velocity, latents, t, given)


def extras(model: nn.Module) -> dict[str, Extra]:
    """Image to video: `image_condition`, the mask and latents of the image, and `image_embeds` of CLIP."""
    config, found = arguments(model), {}
    if config.in_channels > config.out_channels:
        found[IMAGE_CONDITION] = Extra((config.in_channels - config.out_channels,), per_latent=True)
    if config.image_dim is not None:
        found[IMAGE_EMBEDS] = Extra(
            (config.pos_embed_seq_len or FAMILIES[FAMILY.CLASS_NAME].image_tokens, config.image_dim)
        )
    return found


def first(model: nn.Module) -> dict[str, Extra]:
    """Image to video without further channels: `image_condition`, the latents of the first frame, and zeros."""
    return {} if extras(model) else {IMAGE_CONDITION: Extra((arguments(model).in_channels,), per_latent=True)}


FAMILY = Family("WanTransformer3DModel", predict, lists=("blocks",), extras=extras, first=first)
