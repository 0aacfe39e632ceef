"""FLUX.2: modulation shared by all blocks of a kind, parallel single-stream blocks, four axes of position.

Source: Black Forest Labs' FLUX.2; diffusers' Flux2Transformer2DModel and Flux2Pipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.catalog.families import REFERENCE
from bigdit.models.family import Conditions, Family, guidance, text
from bigdit.models.packing import FACTOR, grid, grids, pack_edit, unpack

APART = 10
"""Between the frames of references. Source: diffusers 0.42.1, Flux2Pipeline."""


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D]; H and W are even.

    Positions are (frame, row, column, token): an image's tokens vary in the middle two, a text's in the last. Tokens of
    references follow, whose frames are 10, 20, …; what is predicted of them is dropped.
    """
    embeds, _ = text(conditions)
    height, width = latents.shape[2:]
    guided = guidance(model, latents)
    packed, references = pack_edit(latents, conditions.extras.get(REFERENCE))
    tokens = model(
        hidden_states=packed,
        encoder_hidden_states=embeds,
        timestep=t,
        img_ids=grids(1, height // FACTOR, width // FACTOR, 1, device=latents.device, more=references, apart=APART),
        txt_ids=grid(1, 1, 1, embeds.shape[1], device=latents.device),
        guidance=guided,
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


FAMILY = Family("Flux2Transformer2DModel", predict, lists=("transformer_blocks", "single_transformer_blocks"))
