"""AuraFlow: a few MMDiT blocks, then single-stream blocks, with learned positions and register tokens.

Source: fal's AuraFlow; diffusers' AuraFlowTransformer2DModel and AuraFlowPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T].

    Padding is set to zero, and attended to: the model has no mask.
    """
    embeds, mask = text(conditions)
    return model(
        latents,
        encoder_hidden_states=embeds * mask.unsqueeze(-1),
        timestep=t.to(latents.dtype),
        return_dict=False,
    )[0]


FAMILY = Family("AuraFlowTransformer2DModel", predict, lists=("joint_transformer_blocks", "single_transformer_blocks"))
