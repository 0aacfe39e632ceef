"""HunyuanVideo-1.5: dual-stream blocks over latents of 16 × 16 pixels and two texts.

Its input has channels of a first frame, and its blocks take an image encoder's tokens of it. From text alone the
channels are zeros, and the tokens are left out; the pipeline feeds and masks them.

Source: diffusers' HunyuanVideo15Transformer3DModel, HunyuanVideo15Pipeline and HunyuanVideo15ImageToVideoPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.catalog.families import FAMILIES, IMAGE_CONDITION, IMAGE_EMBEDS
from bigdit.errors import UserError
from bigdit.models.family import Conditions, Extra, Family, arguments, streams, text

TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T].

    The extras are glyph_text [B, T', D'] and glyph_text_mask [B, T'], and of videos that begin with an image
    image_condition [B, 1 + C, F, H, W], whose mask goes in last, and image_embeds [B, 729, D''].
    """
    config = arguments(model)
    embeds, mask = text(conditions)
    batch, channels, *sides = latents.shape
    given = conditions.extras.get(IMAGE_CONDITION)
    more = latents.new_zeros(batch, config.in_channels - channels, *sides) if given is None else given.roll(-1, dims=1)
    return model(
        hidden_states=torch.cat([latents, more], dim=1),
        timestep=(t * TIMESTEP_SCALE).to(latents.dtype),  # the model takes this dtype for that of its weights
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask.bool(),
        encoder_hidden_states_2=conditions.extras["glyph_text"],
        encoder_attention_mask_2=conditions.extras["glyph_text_mask"].bool(),
        image_embeds=conditions.extras.get(IMAGE_EMBEDS, latents.new_zeros(batch, 0, config.image_embed_dim)),
        return_dict=False,
    )[0]


def extras(model: nn.Module) -> dict[str, Extra]:
    """`glyph_text`, ByT5's embedding of text to be rendered, and its mask.

    Raises UserError for a mean-flow model: it needs a second t, which no objective here draws.
    """
    if arguments(model).use_meanflow:
        raise UserError(
            f"model.kwargs.use_meanflow is true, and the adapter of {FAMILY.CLASS_NAME} feeds one t; "
            "use false, the base model"
        )
    return streams(FAMILY.CLASS_NAME, model)


def first(model: nn.Module) -> dict[str, Extra]:
    """Image to video: `image_condition`, the mask and latents of the image, and `image_embeds` of SigLIP."""
    config = arguments(model)
    return {
        IMAGE_CONDITION: Extra((config.in_channels - config.out_channels,), per_latent=True),
        IMAGE_EMBEDS: Extra((FAMILIES[FAMILY.CLASS_NAME].image_tokens, config.image_embed_dim), fill=1),
    }


FAMILY = Family("HunyuanVideo15Transformer3DModel", predict, extras=extras, first=first, unread=1)
