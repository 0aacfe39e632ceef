"""FLUX.1's blocks, fed text states and no pooled vector: Bria 3.2, Chroma, LongCat-Image and Ovis-Image.

Bria has the four channels of SDXL's VAE. Chroma has one small network instead of each block's modulation, and masks
text. Positions of LongCat-Image's patches follow those of its text. Ovis-Image has gated feed-forward layers.

Source: Bria's BRIA-3.2, lodestones' Chroma1-HD, Meituan's LongCat-Image, AIDC-AI's Ovis-Image; diffusers' transformers
and pipelines of these names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text
from bigdit.models.packing import FACTOR, diagonal, grid, pack, positions, unpack

# Bria's published models see 1000 training timesteps.
BRIA_TIMESTEP_SCALE = 1000.0
# Rows and columns of LongCat-Image's patches begin where its longest text ends.
LONGCAT_TEXT_TOKENS = 512


def _velocity(
    model: nn.Module, latents: torch.Tensor, t: torch.Tensor, embeds: torch.Tensor, **inputs: Any
) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text embeds [B, T, D]; H and W are even."""
    tokens = model(hidden_states=pack(latents), encoder_hidden_states=embeds, timestep=t, **inputs, return_dict=False)
    return unpack(tokens[0], *latents.shape[2:])


def predict_bria(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """See _velocity. Padding, which is zeros, is attended to."""
    embeds, _ = text(conditions)
    return _velocity(model, latents, t * BRIA_TIMESTEP_SCALE, embeds, **positions(latents, embeds))


def predict_chroma(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """See _velocity. The mask of text and image has booleans: numbers would be added to the attention's scores."""
    embeds, mask = text(conditions)
    rows, columns = (side // FACTOR for side in latents.shape[2:])
    image_mask = mask.new_ones((len(mask), rows * columns), dtype=torch.bool)
    whole = torch.cat([mask.bool(), image_mask], dim=1)
    return _velocity(model, latents, t, embeds, **positions(latents, embeds), attention_mask=whole)


def predict_longcat(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """See _velocity. Padding is attended to, as in the published training."""
    return _along_diagonal(model, latents, t, conditions, (1, LONGCAT_TEXT_TOKENS, LONGCAT_TEXT_TOKENS))


def predict_ovis(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """See _velocity. Padding, which is zeros, is attended to."""
    return _along_diagonal(model, latents, t, conditions, (0, 0, 0))


def _along_diagonal(
    model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions, start: tuple[int, int, int]
) -> torch.Tensor:
    """See _velocity. Text has positions along the diagonal, the image a grid that begins at `start`."""
    embeds, _ = text(conditions)
    rows, columns = (side // FACTOR for side in latents.shape[2:])
    image_ids = grid(1, rows, columns, start=start, device=latents.device)
    text_ids = diagonal(embeds.shape[1], device=latents.device)
    return _velocity(model, latents, t, embeds, img_ids=image_ids, txt_ids=text_ids)


_LISTS = ("transformer_blocks", "single_transformer_blocks")
BRIA = Family("BriaTransformer2DModel", predict_bria, lists=_LISTS)
CHROMA = Family("ChromaTransformer2DModel", predict_chroma, lists=_LISTS)
LONGCAT = Family("LongCatImageTransformer2DModel", predict_longcat, lists=_LISTS)
OVIS = Family("OvisImageTransformer2DModel", predict_ovis, lists=_LISTS)
