"""PRX: image tokens attend to themselves and to text, whose keys and values are projected in each block.

Source: diffusers' PRXTransformer2DModel and PRXPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T]."""
    embeds, mask = text(conditions)
    return model(
        hidden_states=latents,
        timestep=t,
        encoder_hidden_states=embeds,
        attention_mask=mask.bool(),
        return_dict=False,
    )[0]


FAMILY = Family("PRXTransformer2DModel", predict, lists=("blocks",))
