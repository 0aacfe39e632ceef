"""FLUX.1: two-stream blocks, then single-stream blocks, on 2 × 2 patches of latents with rotary positions.

Source: Black Forest Labs' FLUX.1; diffusers' FluxTransformer2DModel and FluxPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.arguments import arguments
from bigdit.models.conditions import Conditions, Extra
from bigdit.models.packing import FACTOR, grid, pack, unpack

CLASS_NAME = "FluxTransformer2DModel"

# A guidance-distilled model is trained at guidance 1: the prediction itself, with nothing to extrapolate.
GUIDANCE = 1.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D] and the extra pooled_text [B, P].

    H and W are even. Padding is attended to, as in the published training: there is no mask.
    """
    text = conditions.text_embeds
    assert text is not None
    batch, _, height, width = latents.shape
    guidance = torch.full((batch,), GUIDANCE, device=latents.device) if arguments(model).guidance_embeds else None
    tokens = model(
        hidden_states=pack(latents),
        encoder_hidden_states=text,
        pooled_projections=conditions.extras["pooled_text"],
        timestep=t,
        img_ids=grid(1, height // FACTOR, width // FACTOR, device=latents.device).to(latents.dtype),
        txt_ids=torch.zeros(text.shape[1], 3, device=latents.device, dtype=latents.dtype),
        guidance=guidance,
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The two-stream blocks, then the single-stream blocks."""
    return [*model.transformer_blocks, *model.single_transformer_blocks]


def extras(model: nn.Module) -> dict[str, Extra]:
    """The pooled embedding of CLIP."""
    return {"pooled_text": Extra(shape=(arguments(model).pooled_projection_dim,))}
