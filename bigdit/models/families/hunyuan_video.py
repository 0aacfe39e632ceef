"""HunyuanVideo: dual-stream blocks, then single-stream ones, over video and text refined by attention.

Source: Kong et al., arXiv:2412.03603; diffusers' HunyuanVideoTransformer3DModel and HunyuanVideoPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.errors import UserError
from bigdit.models.family import Conditions, Extra, Family, arguments, guidance, text

TIMESTEP_SCALE = 1000.0
# The pipeline of a distilled model multiplies guidance by 1000 too.
GUIDANCE_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T]."""
    embeds, mask = text(conditions)
    return model(
        hidden_states=latents,
        timestep=t * TIMESTEP_SCALE,
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask.bool(),
        pooled_projections=conditions.extras["pooled_text"],
        guidance=guidance(model, latents, GUIDANCE_SCALE, latents.dtype),
        return_dict=False,
    )[0]


def extras(model: nn.Module) -> dict[str, Extra]:
    """`pooled_text`, CLIP's. Raises UserError for a model that continues an image: it has other inputs."""
    config = arguments(model)
    if config.image_condition_type is not None:
        raise UserError(
            f"model.kwargs.image_condition_type is {config.image_condition_type}, and the adapter of "
            f"{FAMILY.CLASS_NAME} feeds no image; use null, the model from text"
        )
    return {"pooled_text": Extra((config.pooled_projection_dim,))}


FAMILY = Family(
    "HunyuanVideoTransformer3DModel", predict, lists=("transformer_blocks", "single_transformer_blocks"), extras=extras
)
