"""Bria 3.2: FLUX.1's blocks on the four channels of SDXL's VAE, fed T5's states and no vector.

Source: Bria's BRIA-3.2; diffusers' BriaTransformer2DModel and BriaPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text
from bigdit.models.packing import pack, positions, unpack

TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D]; H and W are even.

    Padding, which is zeros, is attended to: there is no mask.
    """
    embeds, _ = text(conditions)
    height, width = latents.shape[2:]
    tokens = model(
        hidden_states=pack(latents),
        encoder_hidden_states=embeds,
        timestep=t * TIMESTEP_SCALE,
        **positions(latents, embeds),
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


FAMILY = Family("BriaTransformer2DModel", predict, lists=("transformer_blocks", "single_transformer_blocks"))
