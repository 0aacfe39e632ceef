"""Wan 2.1 and 2.2: self-attention over all of a video, cross-attention to text and, from an image, to its CLIP.

Every token has the sample's t, so Wan 2.2's 5B is trained from text; its image mode gives the first frame a t of 0.

Source: Wan team, arXiv:2503.20314; diffusers' WanTransformer3DModel, WanPipeline and WanImageToVideoPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.catalog.conditions import IMAGE_CONDITION, IMAGE_EMBEDS
from bigdit.catalog.families import FAMILIES
from bigdit.models.family import Conditions, Extra, Family, arguments

TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, 512, D], zeros where padded."""
    condition = conditions.extras.get(IMAGE_CONDITION)
    return model(
        hidden_states=latents if condition is None else torch.cat([latents, condition], dim=1),
        timestep=t * TIMESTEP_SCALE,
        encoder_hidden_states=conditions.text_embeds,
        encoder_hidden_states_image=conditions.extras.get(IMAGE_EMBEDS),
        return_dict=False,
    )[0]


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


FAMILY = Family("WanTransformer3DModel", predict, lists=("blocks",), extras=extras)
