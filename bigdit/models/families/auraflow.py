"""AuraFlow: a few MMDiT blocks, then single-stream blocks, with learned positions and register tokens.

Source: fal's AuraFlow; diffusers' AuraFlowTransformer2DModel and AuraFlowPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.conditions import Conditions, Extra

CLASS_NAME = "AuraFlowTransformer2DModel"


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T].

    Padding is set to zero, and attended to: the model has no mask.
    """
    assert conditions.text_embeds is not None
    assert conditions.text_mask is not None
    return model(
        latents,
        encoder_hidden_states=conditions.text_embeds * conditions.text_mask.unsqueeze(-1),
        timestep=t.to(latents.dtype),
        return_dict=False,
    )[0]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The MMDiT blocks, then the single-stream blocks."""
    return [*model.joint_transformer_blocks, *model.single_transformer_blocks]


def extras(model: nn.Module) -> dict[str, Extra]:
    """Nothing beside latents, t and text."""
    return {}
