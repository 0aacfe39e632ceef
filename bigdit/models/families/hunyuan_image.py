"""HunyuanImage-2.1: dual-stream blocks, then single-stream ones, over latents of 32 × 32 pixels and two texts.

Source: diffusers' HunyuanImageTransformer2DModel and HunyuanImagePipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.errors import UserError
from bigdit.models.family import Conditions, Extra, Family, arguments, guidance, streams, text

TIMESTEP_SCALE = 1000.0
# The pipeline of a distilled model multiplies guidance by 1000 too.
GUIDANCE_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T].

    A model with a second text also takes the extras glyph_text [B, T', D'] and glyph_text_mask [B, T'].
    """
    embeds, mask = text(conditions)
    return model(
        hidden_states=latents,
        timestep=(t * TIMESTEP_SCALE).to(latents.dtype),  # the model takes this dtype for that of its weights
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask.bool(),
        encoder_hidden_states_2=conditions.extras.get("glyph_text"),
        encoder_attention_mask_2=conditions.extras.get("glyph_text_mask"),
        guidance=guidance(model, latents, GUIDANCE_SCALE, latents.dtype),
        return_dict=False,
    )[0]


def extras(model: nn.Module) -> dict[str, Extra]:
    """`glyph_text`, ByT5's embedding of text to be rendered, and its mask, where the model has a second text.

    Raises UserError for a mean-flow model: it needs a second t, which no objective here draws.
    """
    config = arguments(model)
    if config.use_meanflow:
        raise UserError(
            f"model.kwargs.use_meanflow is true, and the adapter of {FAMILY.CLASS_NAME} feeds one t; "
            "use false, the base model"
        )
    return streams(FAMILY.CLASS_NAME, model)


FAMILY = Family(
    "HunyuanImageTransformer2DModel", predict, lists=("transformer_blocks", "single_transformer_blocks"), extras=extras
)
