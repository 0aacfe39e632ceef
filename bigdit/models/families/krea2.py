"""Krea 2: single-stream blocks with grouped queries over 2 × 2 patches and text fused from several layers.

The text encoder's layers are the text's features: text_embeds [B, T, layers · dim].

Source: diffusers' Krea2Transformer2DModel and Krea2Pipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, arguments, text
from bigdit.models.packing import FACTOR, pack, unpack


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, layers · D], text_mask [B, T]."""
    embeds, mask = text(conditions)
    height, width = latents.shape[2:]
    layers = embeds.unflatten(2, (arguments(model).num_text_layers, -1))
    tokens = model(
        hidden_states=pack(latents),
        encoder_hidden_states=layers,
        timestep=t,
        position_ids=_positions(embeds.shape[1], height // FACTOR, width // FACTOR, latents.device),
        encoder_attention_mask=mask.bool(),
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


def _positions(tokens: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """(0, row, column) of each patch after the zeros of the text, [tokens + rows · columns, 3] in fp32."""
    grid = torch.zeros(rows, columns, 3, device=device)
    grid[..., 1] = torch.arange(rows, device=device)[:, None]
    grid[..., 2] = torch.arange(columns, device=device)
    return torch.cat([torch.zeros(tokens, 3, device=device), grid.flatten(0, 1)])


FAMILY = Family("Krea2Transformer2DModel", predict)
