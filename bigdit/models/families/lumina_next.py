"""Lumina-Next: sandwich norms, gated cross-attention to text, complex two-dimensional rotary positions.

Source: Zhuo et al., arXiv:2406.18583; diffusers' LuminaNextDiT2DModel and LuminaPipeline.
"""

from __future__ import annotations

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from torch import nn

from bigdit.models.family import Conditions, Family


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T].

    With learned sigma the output has 2 C channels, of which these are the first C. The model counts time from noise, 0,
    to image, 1, and predicts along it: its output is negated. Its parameter pad_token is not used.
    """
    rows, columns = (side // model.patch_size for side in latents.shape[2:])
    output = model(
        hidden_states=latents,
        timestep=1.0 - t,
        encoder_hidden_states=conditions.text_embeds,
        encoder_mask=conditions.text_mask,
        image_rotary_emb=get_2d_rotary_pos_embed_lumina(model.head_dim, rows, columns),
        cross_attention_kwargs={},
        return_dict=False,
    )[0]
    return -output[:, : latents.shape[1]]


FAMILY = Family("LuminaNextDiT2DModel", predict, lists=("layers",))
