"""Latents as tokens of 2 × 2 patches, as in the Flux family, with their positions; and texts without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch.nn import functional as F

FACTOR = 2


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Latents [B, C, H, W] as tokens [B, H/2 · W/2, 4 C], row by row; channels vary slowest in a token."""
    batch, channels, height, width = latents.shape
    tiles = latents.view(batch, channels, height // FACTOR, FACTOR, width // FACTOR, FACTOR)
    tokens = height // FACTOR * (width // FACTOR)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(batch, tokens, channels * FACTOR**2)


def pack_edit(latents: torch.Tensor, references: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """The tokens of latents, then those of `references` [B, references, C, H, W]; and the number of references."""
    if references is None:
        return pack(latents), 0
    images = references.unbind(1)
    return torch.cat([pack(latents), *map(pack, images)], dim=1), len(images)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Latents [B, C, height, width] from tokens [B, height/2 · width/2, 4 C]: the inverse of `pack`. Further tokens are
    dropped."""
    batch, _, channels = tokens.shape
    own = tokens[:, : height // FACTOR * (width // FACTOR)]
    tiles = own.view(batch, height // FACTOR, width // FACTOR, channels // FACTOR**2, FACTOR, FACTOR)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // FACTOR**2, height, width)


def positions(latents: torch.Tensor, text: torch.Tensor, references: int = 0) -> dict[str, torch.Tensor]:
    """FLUX.1's `img_ids` [H/2 · W/2, 3], 0, row and column of patches, and `txt_ids` [T, 3], zeros; latents' dtype.

    The patches of `references` follow; their first numbers are 1, 2, …, as in diffusers' FluxKontextPipeline.
    """
    sides = [length // FACTOR for length in latents.shape[2:]]
    return {
        "img_ids": grids(1, *sides, device=latents.device, more=references).to(latents.dtype),
        "txt_ids": torch.zeros(text.shape[1], 3, device=latents.device, dtype=latents.dtype),
    }


def grid(*lengths: int, device: torch.device, start: tuple[int, ...] | None = None) -> torch.Tensor:
    """Positions [product of lengths, axes] int64 in a grid from `start` or zero, the last axis varying fastest."""
    axes = zip(start or (0,) * len(lengths), lengths, strict=True)
    return torch.cartesian_prod(*(torch.arange(first, first + length, device=device) for first, length in axes))


def grids(*lengths: int, device: torch.device, more: int, apart: int = 1) -> torch.Tensor:
    """Positions of a grid from zero, and of `more` equal grids; the first numbers of two grids differ by `apart`."""
    places = (grid(*lengths, device=device, start=(at * apart, *(0,) * (len(lengths) - 1))) for at in range(1 + more))
    own, *others = places
    return torch.cat([own, *others]) if others else own


def diagonal(tokens: int, *, device: torch.device) -> torch.Tensor:
    """Positions [tokens, 3] int64 of a text along the diagonal: 0, i and i."""
    place = torch.arange(tokens, device=device)
    return torch.stack([torch.zeros_like(place), place, place], dim=1)


class Unpadded:
    """Calls a class's own attention, `whole`, for one sample at a time, each with its number of text `tokens`."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.tokens: Sequence[int] = ()

    @classmethod
    def of(cls, attentions: Sequence[Any]) -> Self:
        """The one processor of all these attentions, set before the first pass."""
        found = attentions[0].processor
        if isinstance(found, cls):
            return found
        made = cls(found)
        for attention in attentions:
            attention.set_processor(made)
        return made


def padded(rows: Iterable[torch.Tensor], length: int) -> torch.Tensor:
    """Rows [1, T, D] as one tensor of `length` tokens, zeros after each."""
    return torch.cat([F.pad(row, (0, 0, 0, length - row.shape[1])) for row in rows])
