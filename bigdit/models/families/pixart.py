"""PixArt-α and -Σ: DiT blocks with one shared modulation, and cross-attention to text.

Source: Chen et al., arXiv:2310.00426 and arXiv:2403.04692; diffusers' PixArtTransformer2DModel and PixArtAlphaPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family

# The published models see 1000 training timesteps.
TIMESTEP_SCALE = 1000.0
# Pixels per latent of the VAEs of all published models: micro-conditions are in pixels.
VAE_DOWNSAMPLE = 8


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Output [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D], text_mask [B, T]; 2 C channels of a
    model with learned sigma.

    Micro-conditions, of the models that take them, are the size and the aspect ratio of these latents.
    """
    return model(
        latents,
        encoder_hidden_states=conditions.text_embeds,
        timestep=t * TIMESTEP_SCALE,
        added_cond_kwargs=_micro_conditions(model, latents),
        encoder_attention_mask=conditions.text_mask,
        return_dict=False,
    )[0]


def _micro_conditions(model: nn.Module, latents: torch.Tensor) -> dict[str, torch.Tensor | None]:
    if not model.use_additional_conditions:
        return {"resolution": None, "aspect_ratio": None}
    batch, _, height, width = latents.shape
    pixels = torch.tensor([[height * VAE_DOWNSAMPLE, width * VAE_DOWNSAMPLE]], dtype=latents.dtype)
    ratio = torch.tensor([[height / width]], dtype=latents.dtype)
    return {
        "resolution": pixels.repeat(batch, 1).to(latents.device, non_blocking=True),
        "aspect_ratio": ratio.repeat(batch, 1).to(latents.device, non_blocking=True),
    }


FAMILY = Family("PixArtTransformer2DModel", predict)
