"""Sana: linear self-attention, cross-attention to text, feed-forward of 1×1 and depthwise convolutions.

Source: Xie et al., arXiv:2410.10629; Chen et al., arXiv:2503.09641 (Sana-Sprint); diffusers' SanaTransformer2DModel.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, arguments, control, guidance

# The published checkpoints see the flow's t in [0, 1] as 0 … 1000 (diffusers' FlowMatchEulerDiscreteScheduler).
TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T].

    Sana-Sprint, which embeds guidance, sees the flow's t in [0, 1] as it is (diffusers' SanaSprintPipeline).
    """
    guided = guidance(model, latents, arguments(model).guidance_embeds_scale, latents.dtype)
    return model(
        hidden_states=latents,
        encoder_hidden_states=conditions.text_embeds,
        timestep=t * TIMESTEP_SCALE if guided is None else t,
        guidance=guided,
        encoder_attention_mask=conditions.text_mask,
        return_dict=False,
        **control(model, conditions),
    )[0]


FAMILY = Family("SanaTransformer2DModel", predict)
