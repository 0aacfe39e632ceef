"""FLUX.2: modulation shared by all blocks of a kind, parallel single-stream blocks, four axes of position.

Source: Black Forest Labs' FLUX.2; diffusers' Flux2Transformer2DModel and Flux2Pipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.arguments import arguments
from bigdit.models.conditions import Conditions, Extra
from bigdit.models.packing import FACTOR, grid, pack, unpack

CLASS_NAME = "Flux2Transformer2DModel"

# A guidance-distilled model is trained at guidance 1: the prediction itself, with nothing to extrapolate.
GUIDANCE = 1.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D]; H and W are even.

    Positions are (frame, row, column, token): an image's tokens vary in the middle two, a text's in the last.
    """
    text = conditions.text_embeds
    assert text is not None
    batch, _, height, width = latents.shape
    guidance = torch.full((batch,), GUIDANCE, device=latents.device) if arguments(model).guidance_embeds else None
    tokens = model(
        hidden_states=pack(latents),
        encoder_hidden_states=text,
        timestep=t,
        img_ids=grid(1, height // FACTOR, width // FACTOR, 1, device=latents.device),
        txt_ids=grid(1, 1, 1, text.shape[1], device=latents.device),
        guidance=guidance,
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The two-stream blocks, then the single-stream blocks."""
    return [*model.transformer_blocks, *model.single_transformer_blocks]


def extras(model: nn.Module) -> dict[str, Extra]:
    """Nothing beside latents, t and text."""
    return {}
