"""Lumina-Image 2.0: text and image refined apart, then one stream of both, with complex rotary positions.

Source: Qin et al., arXiv:2503.21758; diffusers' Lumina2Transformer2DModel and Lumina2Pipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.conditions import Conditions, Extra

CLASS_NAME = "Lumina2Transformer2DModel"


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T].

    The model counts time from noise, 0, to image, 1, and predicts along it: its output is negated. It reads how
    many tokens each mask has, which waits for the device.
    """
    assert conditions.text_mask is not None
    return -model(
        hidden_states=latents,
        timestep=1.0 - t,
        encoder_hidden_states=conditions.text_embeds,
        encoder_attention_mask=conditions.text_mask.bool(),
        return_dict=False,
    )[0]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The text's refiner, the image's, then the layers of both."""
    return [*model.context_refiner, *model.noise_refiner, *model.layers]


def extras(model: nn.Module) -> dict[str, Extra]:
    """Nothing beside latents, t and text."""
    return {}
