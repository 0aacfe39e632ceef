"""SANA-Video: linear self-attention, cross-attention to text, convolutions in space and then in time.

Source: Chen et al., arXiv:2509.24695; diffusers' SanaVideoTransformer3DModel and SanaVideoPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family

TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T]."""
    return model(
        hidden_states=latents,
        encoder_hidden_states=conditions.text_embeds,
        timestep=t * TIMESTEP_SCALE,
        encoder_attention_mask=conditions.text_mask,
        return_dict=False,
    )[0]


FAMILY = Family("SanaVideoTransformer3DModel", predict)
