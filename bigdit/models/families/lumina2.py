"""Lumina-Image 2.0: text and image refined apart, then one stream of both, with complex rotary positions.

Source: Qin et al., arXiv:2503.21758; diffusers' Lumina2Transformer2DModel and Lumina2Pipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T].

    The model counts time from noise, 0, to image, 1, and predicts along it: its output is negated. It reads how
    many tokens each mask has, which waits for the device.
    """
    embeds, mask = text(conditions)
    return -model(
        hidden_states=latents,
        timestep=1.0 - t,
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask.bool(),
        return_dict=False,
    )[0]


FAMILY = Family("Lumina2Transformer2DModel", predict, lists=("context_refiner", "noise_refiner", "layers"))
