"""Sana: linear self-attention, cross-attention to text, feed-forward of 1×1 and depthwise convolutions.

Source: Xie et al., arXiv:2410.10629; Chen et al., arXiv:2503.09641 (Sana-Sprint); diffusers' SanaTransformer2DModel.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.arguments import arguments
from bigdit.models.conditions import Conditions, Extra

CLASS_NAME = "SanaTransformer2DModel"

# The published checkpoints see the flow's t in [0, 1] as 0 … 1000 (diffusers' FlowMatchEulerDiscreteScheduler).
TIMESTEP_SCALE = 1000.0
# A guidance-distilled model is trained at guidance 1: the prediction itself, with nothing to extrapolate.
GUIDANCE = 1.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T].

    Sana-Sprint, which embeds guidance, sees the flow's t in [0, 1] as it is (diffusers' SanaSprintPipeline).
    """
    guidance = None
    if arguments(model).guidance_embeds:
        scale = GUIDANCE * arguments(model).guidance_embeds_scale
        guidance = torch.full(t.shape, scale, dtype=latents.dtype, device=t.device)
    return model(
        hidden_states=latents,
        encoder_hidden_states=conditions.text_embeds,
        timestep=t * TIMESTEP_SCALE if guidance is None else t,
        guidance=guidance,
        encoder_attention_mask=conditions.text_mask,
        return_dict=False,
    )[0]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, in the order of the forward pass."""
    return list(model.transformer_blocks)


def extras(model: nn.Module) -> dict[str, Extra]:
    """Nothing beside latents, t and text."""
    return {}
