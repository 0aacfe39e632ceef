"""HunyuanVideo-1.5: dual-stream blocks over latents of 16 × 16 pixels and two texts.

Its input has channels of a first frame, and its blocks take what an image encoder sees in that. From text alone the
channels are zeros, and tokens of no image are left out, which the pipeline feeds and masks.

Source: diffusers' HunyuanVideo15Transformer3DModel and HunyuanVideo15Pipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.errors import UserError
from bigdit.models.family import Conditions, Extra, Family, arguments, streams, text

TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T], and the
    extras glyph_text [B, T', D'] and glyph_text_mask [B, T']."""
    config = arguments(model)
    embeds, mask = text(conditions)
    batch, channels, *sides = latents.shape
    return model(
        hidden_states=torch.cat([latents, latents.new_zeros(batch, config.in_channels - channels, *sides)], dim=1),
        timestep=(t * TIMESTEP_SCALE).to(latents.dtype),  # whose dtype the model takes for that of its weights
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask.bool(),
        encoder_hidden_states_2=conditions.extras["glyph_text"],
        encoder_attention_mask_2=conditions.extras["glyph_text_mask"].bool(),
        image_embeds=latents.new_zeros(batch, 0, config.image_embed_dim),
        return_dict=False,
    )[0]


def extras(model: nn.Module) -> dict[str, Extra]:
    """`glyph_text`, ByT5's of what is to be written in the video, and its mask.

    Raises UserError for a mean-flow model, whose second t no objective here draws.
    """
    if arguments(model).use_meanflow:
        raise UserError(
            f"model.kwargs.use_meanflow is true, and the adapter of {FAMILY.CLASS_NAME} feeds one t; "
            "use false, the base model"
        )
    return streams(FAMILY.CLASS_NAME, model)


FAMILY = Family("HunyuanVideo15Transformer3DModel", predict, extras=extras)
