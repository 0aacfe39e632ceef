"""2 × 2 patches of latents as tokens, as the Flux family is fed them, and where each token is."""

from __future__ import annotations

import torch

FACTOR = 2


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Latents [B, C, H, W] as tokens [B, H/2 · W/2, 4 C], row by row; channels vary slowest in a token."""
    batch, channels, height, width = latents.shape
    tiles = latents.view(batch, channels, height // FACTOR, FACTOR, width // FACTOR, FACTOR)
    tokens = height // FACTOR * (width // FACTOR)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(batch, tokens, channels * FACTOR**2)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Latents [B, C, height, width] from tokens [B, height/2 · width/2, 4 C]: the inverse of `pack`."""
    batch, _, channels = tokens.shape
    tiles = tokens.view(batch, height // FACTOR, width // FACTOR, channels // FACTOR**2, FACTOR, FACTOR)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // FACTOR**2, height, width)


def grid(*lengths: int, device: torch.device) -> torch.Tensor:
    """Positions [product of lengths, axes] int64 in a grid, the last axis varying fastest."""
    return torch.cartesian_prod(*(torch.arange(length, device=device) for length in lengths))
