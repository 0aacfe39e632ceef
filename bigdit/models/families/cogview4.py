"""CogView4: one sequence of text and image, conditioned on the picture's size.

Its attention has no mask that a kernel takes: each sample attends to its own text, without its padding.

Source: diffusers' CogView4Transformer2DModel and CogView4Pipeline (Zheng et al., arXiv:2403.05121, for the sizes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bigdit.models.conditions import Conditions, text
from bigdit.models.family import Family

if TYPE_CHECKING:
    from bigdit.models.unpadded import Unpadded

TIMESTEP_SCALE = 1000.0
# Pixels a latent: sizes are told in pixels.
DOWNSAMPLE = 8


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T].

    It reads how many tokens each mask has, which waits for the device.
    """
    embeds, mask = text(conditions)
    tokens = mask.bool().sum(1).tolist()
    _unpadded(model).tokens = tokens
    return of_sizes(model, latents, t, embeds[:, : max(tokens)])


def of_sizes(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """What a model that is conditioned on sizes predicts of whole, uncropped pictures, from all of a text."""
    batch, _, height, width = latents.shape
    pixels = torch.tensor([[height * DOWNSAMPLE, width * DOWNSAMPLE]], dtype=latents.dtype)
    size = pixels.to(latents.device, non_blocking=True).repeat(batch, 1)
    return model(
        hidden_states=latents,
        encoder_hidden_states=embeds,
        timestep=t * TIMESTEP_SCALE,
        original_size=size,
        target_size=size,
        crop_coords=torch.zeros_like(size),
        return_dict=False,
    )[0]


def _unpadded(model: Any) -> Unpadded:
    """The attention of all blocks, which they are given before the first pass."""
    from bigdit.models.unpadded import Unpadded  # here: diffusers' own file of the class imports all that loads weights

    found = model.transformer_blocks[0].attn1.processor
    if isinstance(found, Unpadded):
        return found
    made = Unpadded()
    for block in model.transformer_blocks:
        block.attn1.set_processor(made)
    return made


FAMILY = Family("CogView4Transformer2DModel", predict)
