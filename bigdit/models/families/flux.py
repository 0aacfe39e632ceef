"""FLUX.1: two-stream blocks, then single-stream blocks, on 2 × 2 patches of latents with rotary positions.

Source: Black Forest Labs' FLUX.1; diffusers' FluxTransformer2DModel, FluxPipeline, FluxKontextPipeline,
FluxControlPipeline and FluxFillPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.catalog.families import FILL, PACKING, REFERENCE
from bigdit.models.family import Conditions, Extra, Family, arguments, control, guidance, text
from bigdit.models.packing import pack, pack_edit, positions, unpack


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D] and the extra pooled_text [B, P].

    H and W are even. Padding is attended to, as in the published training: there is no mask. The tokens of references
    follow those of the latents, and what is predicted of them is dropped. A model of twice the channels (Canny, Depth)
    takes its one reference in these, and one of more (Fill) the extra fill [B, C', H, W].
    """
    embeds, _ = text(conditions)
    height, width = latents.shape[2:]
    guided = guidance(model, latents)
    controlled = control(model, conditions, pack)
    given = None if controlled else conditions.extras.get(REFERENCE)
    if FILL in conditions.extras:
        packed, references = pack(torch.cat([latents, conditions.extras[FILL]], dim=1)), 0
    elif given is not None and arguments(model).in_channels == 2 * PACKING**2 * latents.shape[1]:
        packed, references = pack(torch.cat([latents, given[:, 0]], dim=1)), 0
    else:
        packed, references = pack_edit(latents, given)
    tokens = model(
        hidden_states=packed,
        encoder_hidden_states=embeds,
        pooled_projections=conditions.extras["pooled_text"],
        timestep=t,
        **positions(latents, embeds, references),
        guidance=guided,
        return_dict=False,
        **controlled,
    )[0]
    return unpack(tokens, height, width)


def extras(model: nn.Module) -> dict[str, Extra]:
    """The pooled embedding of CLIP, and of Fill the masked image with its mask."""
    config = arguments(model)
    found = {"pooled_text": Extra(shape=(config.pooled_projection_dim,))}
    channels = config.out_channels or config.in_channels
    if config.in_channels > 2 * channels:
        found[FILL] = Extra(((config.in_channels - channels) // PACKING**2,), per_latent=True)
    return found


FAMILY = Family(
    "FluxTransformer2DModel", predict, lists=("transformer_blocks", "single_transformer_blocks"), extras=extras
)
