"""Chroma: FLUX.1 with one small network in place of the modulation of every block, and text masked.

Source: lodestones' Chroma1-HD; diffusers' ChromaTransformer2DModel and ChromaPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.conditions import Conditions, Extra
from bigdit.models.packing import FACTOR, grid, pack, unpack

CLASS_NAME = "ChromaTransformer2DModel"


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T].

    H and W are even. The mask over text and image goes in as booleans: as numbers it would be added to the
    attention's scores.
    """
    text, mask = conditions.text_embeds, conditions.text_mask
    assert text is not None
    assert mask is not None
    _, _, height, width = latents.shape
    hidden_states = pack(latents)
    image_mask = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=latents.device)
    tokens = model(
        hidden_states=hidden_states,
        encoder_hidden_states=text,
        timestep=t,
        img_ids=grid(1, height // FACTOR, width // FACTOR, device=latents.device).to(latents.dtype),
        txt_ids=torch.zeros(text.shape[1], 3, device=latents.device, dtype=latents.dtype),
        attention_mask=torch.cat([mask.bool(), image_mask], dim=1),
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The two-stream blocks, then the single-stream blocks."""
    return [*model.transformer_blocks, *model.single_transformer_blocks]


def extras(model: nn.Module) -> dict[str, Extra]:
    """Nothing beside latents, t and text."""
    return {}
