"""Ovis-Image: FLUX.1's blocks with gated feed-forward layers, fed the states of a language model and no vector.

Source: AIDC-AI's Ovis-Image; diffusers' OvisImageTransformer2DModel and OvisImagePipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text
from bigdit.models.packing import FACTOR, diagonal, grid, pack, unpack


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D]; H and W are even.

    Padding, which is zeros, is attended to: there is no mask.
    """
    embeds, _ = text(conditions)
    height, width = latents.shape[2:]
    tokens = model(
        hidden_states=pack(latents),
        encoder_hidden_states=embeds,
        timestep=t,
        img_ids=grid(1, height // FACTOR, width // FACTOR, device=latents.device),
        txt_ids=diagonal(embeds.shape[1], device=latents.device),
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


FAMILY = Family("OvisImageTransformer2DModel", predict, lists=("transformer_blocks", "single_transformer_blocks"))
