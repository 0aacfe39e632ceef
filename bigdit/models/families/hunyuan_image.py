"""HunyuanImage-2.1: dual-stream blocks, then single-stream ones, over latents of 32 × 32 pixels and two texts.

Source: diffusers' HunyuanImageTransformer2DModel and HunyuanImagePipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.errors import UserError
from bigdit.models.arguments import arguments
from bigdit.models.conditions import Conditions, Extra, guidance, text
from bigdit.models.family import Family

TIMESTEP_SCALE = 1000.0
# Of a distilled model, whose pipeline multiplies guidance by 1000 too.
GUIDANCE_SCALE = 1000.0
# ByT5's tokens of the text to be rendered in the picture.
GLYPH_TOKENS = 128


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T]."""
    embeds, mask = text(conditions)
    glyph_mask = conditions.extras.get("glyph_mask")
    return model(
        hidden_states=latents,
        timestep=(t * TIMESTEP_SCALE).to(latents.dtype),  # whose dtype the model takes for that of its weights
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask.bool(),
        encoder_hidden_states_2=conditions.extras.get("glyph_text"),
        encoder_attention_mask_2=glyph_mask,
        guidance=guidance(model, latents, GUIDANCE_SCALE, latents.dtype),
        return_dict=False,
    )[0]


def extras(model: nn.Module) -> dict[str, Extra]:
    """`glyph_text` and `glyph_mask`, ByT5's, where the model has a second text.

    Raises UserError for a mean-flow model, whose second t no objective here draws.
    """
    config = arguments(model)
    if config.use_meanflow:
        raise UserError(
            f"model.kwargs.use_meanflow is true, and the adapter of {FAMILY.CLASS_NAME} feeds one t; "
            "use false, the base model"
        )
    if config.text_embed_2_dim is None:
        return {}
    return {
        "glyph_text": Extra((GLYPH_TOKENS, config.text_embed_2_dim)),
        "glyph_mask": Extra((GLYPH_TOKENS,), torch.bool, fill=1),
    }


FAMILY = Family(
    "HunyuanImageTransformer2DModel", predict, lists=("transformer_blocks", "single_transformer_blocks"), extras=extras
)
