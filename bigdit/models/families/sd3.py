"""Stable Diffusion 3 and 3.5: MMDiT, two streams of tokens that meet in attention.

Source: Esser et al., arXiv:2403.03206; diffusers' SD3Transformer2DModel and StableDiffusion3Pipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Extra, Family, arguments, control

# The published models see the flow's t in [0, 1] as 0 … 1000.
TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D] and the extra pooled_text [B, P].

    Padding is attended to, as in the published training: there is no mask.
    """
    return model(
        hidden_states=latents,
        timestep=t * TIMESTEP_SCALE,
        encoder_hidden_states=conditions.text_embeds,
        pooled_projections=conditions.extras["pooled_text"],
        return_dict=False,
        **control(model, conditions),
    )[0]


def extras(model: nn.Module) -> dict[str, Extra]:
    """The pooled embeddings of both CLIP encoders, joined."""
    return {"pooled_text": Extra(shape=(arguments(model).pooled_projection_dim,))}


FAMILY = Family("SD3Transformer2DModel", predict, extras=extras)
