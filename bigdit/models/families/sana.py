"""Sana: linear self-attention, cross-attention to text, feed-forward of 1×1 and depthwise convolutions.

Source: Xie et al., arXiv:2410.10629; diffusers' SanaTransformer2DModel.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.conditions import Conditions, Extra

CLASS_NAME = "SanaTransformer2DModel"

# The published checkpoints see the flow's t in [0, 1] as 0 … 1000 (diffusers' FlowMatchEulerDiscreteScheduler).
TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T]."""
    return model(
        hidden_states=latents,
        encoder_hidden_states=conditions.text_embeds,
        timestep=t * TIMESTEP_SCALE,
        encoder_attention_mask=conditions.text_mask,
        return_dict=False,
    )[0]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, in the order of the forward pass."""
    return list(model.transformer_blocks)


def extras(model: nn.Module) -> dict[str, Extra]:
    """Nothing beside latents, t and text."""
    return {}
