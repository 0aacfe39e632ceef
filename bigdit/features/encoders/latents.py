"""A VAE's encoding as the latents that transformers are trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

# Whose encoders take frames; of a picture, one.
VIDEO_VAES = (
    "AutoencoderKLCogVideoX",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLQwenImage",
    "AutoencoderKLWan",
)


def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Latents [B, C, (F,) h, w] of pixels [B, 3, (F,) H, W] in [-1, 1] and the VAE's dtype, normalised.

    A distribution gives its mode: features are the same whenever they are encoded.
    """
    picture = pixels.dim() == 4 and type(vae).__name__ in VIDEO_VAES
    encoded = vae.encode(pixels.unsqueeze(2) if picture else pixels)
    z = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
    return _normalised(vae, z.squeeze(2) if picture else z)


def _normalised(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """Shift and scale as the VAE's config says. Source: the family's pipeline in diffusers 0.42.1."""
    name, config = type(vae).__name__, vae.config
    if name == "AutoencoderKLFlux2":  # by a batch norm's statistics, over 2 × 2 patches as channels
        patches = F.pixel_unshuffle(z, 2)
        mean, variance = (each.view(1, -1, 1, 1) for each in (vae.bn.running_mean, vae.bn.running_var))
        deviation = torch.sqrt(variance + config.batch_norm_eps)
        return F.pixel_shuffle((patches - mean.to(z)) / deviation.to(z), 2)
    if name == "AutoencoderKLLTXVideo":
        mean, deviation = (_per_channel(each, z) for each in (vae.latents_mean, vae.latents_std))
        return (z - mean) * config.scaling_factor / deviation
    if name in ("AutoencoderKLWan", "AutoencoderKLQwenImage"):
        mean, deviation = (_per_channel(torch.tensor(each), z) for each in (config.latents_mean, config.latents_std))
        return (z - mean) / deviation
    return (z - float(config.get("shift_factor") or 0.0)) * float(config.scaling_factor)


def _per_channel(values: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *(1 for _ in z.shape[2:])).to(z)
