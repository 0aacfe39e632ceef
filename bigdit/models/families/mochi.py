"""Mochi 1: one attention of video and text, whose streams have widths of their own; positions are learned frequencies.

Source: Genmo, https://github.com/genmoai/mochi; diffusers' MochiTransformer3DModel and MochiPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text

TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T].

    The model counts time from noise, 0, to video, 1, and predicts along it: its output is negated. Each block reads
    which tokens of a caption are shown, which waits for the device.
    """
    embeds, mask = text(conditions)
    return -model(
        hidden_states=latents,
        encoder_hidden_states=embeds,
        timestep=(1.0 - t) * TIMESTEP_SCALE,
        encoder_attention_mask=mask.bool(),
        return_dict=False,
    )[0]


FAMILY = Family("MochiTransformer3DModel", predict)
