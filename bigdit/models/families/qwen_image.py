"""Qwen-Image: dual-stream blocks over text of a language model and 2 × 2 patches, complex rotary positions.

Source: Wu et al., arXiv:2508.02324; diffusers' QwenImageTransformer2DModel and QwenImagePipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text
from bigdit.models.packing import FACTOR, pack, unpack


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T]."""
    embeds, mask = text(conditions)
    batch, _, height, width = latents.shape
    tokens = model(
        hidden_states=pack(latents),
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask.bool(),
        timestep=t,
        img_shapes=[[(1, height // FACTOR, width // FACTOR)]] * batch,
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


FAMILY = Family("QwenImageTransformer2DModel", predict)
