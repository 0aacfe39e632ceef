"""Chroma: FLUX.1 with one small network in place of the modulation of every block, and text masked.

Source: lodestones' Chroma1-HD; diffusers' ChromaTransformer2DModel and ChromaPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text
from bigdit.models.packing import pack, positions, unpack


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T].

    H and W are even. The mask over text and image goes in as booleans: as numbers it would be added to the
    attention's scores.
    """
    embeds, mask = text(conditions)
    height, width = latents.shape[2:]
    hidden_states = pack(latents)
    image_mask = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=latents.device)
    tokens = model(
        hidden_states=hidden_states,
        encoder_hidden_states=embeds,
        timestep=t,
        **positions(latents, embeds),
        attention_mask=torch.cat([mask.bool(), image_mask], dim=1),
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


FAMILY = Family("ChromaTransformer2DModel", predict, lists=("transformer_blocks", "single_transformer_blocks"))
