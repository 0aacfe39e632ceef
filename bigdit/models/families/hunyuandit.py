"""Hunyuan-DiT: DiT blocks with long skips, cross-attention to two texts, of a bilingual CLIP and of mT5.

Source: Li et al., arXiv:2405.08748; diffusers' HunyuanDiT2DModel and HunyuanDiTPipeline.
"""

from __future__ import annotations

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import nn

from bigdit.models.family import Conditions, Extra, Family, arguments, streams

# The published models see 1000 training timesteps.
TIMESTEP_SCALE = 1000.0
# Pixels per latent of the published models' VAE: the sizes of an image are in pixels.
VAE_DOWNSAMPLE = 8
# Positions are those of a grid of this many pixels a side, to which the latents' grid is resized.
BASE_PIXELS = 512


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Output [B, C, H, W] for latents [B, C, H, W], t [B], mT5's text_embeds [B, 256, D] and text_mask [B, 256], and
    the extras clip_text [B, 77, D'] and clip_text_mask [B, 77]; 2 C channels of a model with learned sigma.

    A model of version 1.1 or before gets whole images of the latents' own size, and style 0, its only
    one. All states of mT5 are pooled, also those that the mask hides from attention.
    """
    return model(
        latents,
        (t * TIMESTEP_SCALE).to(latents.dtype),  # the model takes this dtype for that of its weights
        encoder_hidden_states=conditions.extras["clip_text"],
        text_embedding_mask=conditions.extras["clip_text_mask"],
        encoder_hidden_states_t5=conditions.text_embeds,
        text_embedding_mask_t5=conditions.text_mask,
        image_meta_size=_image_sizes(latents),
        style=torch.zeros(latents.shape[0], dtype=torch.int64, device=latents.device),
        image_rotary_emb=_positions(model, latents),
        return_dict=False,
    )[0]


def _image_sizes(latents: torch.Tensor) -> torch.Tensor:
    """[B, 6]: original height and width, target height and width, top and left of the crop."""
    batch, _, height, width = latents.shape
    size = [height * VAE_DOWNSAMPLE, width * VAE_DOWNSAMPLE]
    sizes = torch.tensor([[*size, *size, 0, 0]], dtype=latents.dtype).repeat(batch, 1)
    return sizes.to(latents.device, non_blocking=True)


def _positions(model: nn.Module, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    patch_size = arguments(model).patch_size
    rows, columns = (side // patch_size for side in latents.shape[2:])
    region = _region(rows, columns, BASE_PIXELS // VAE_DOWNSAMPLE // patch_size)
    head_dim = model.inner_dim // model.num_heads
    return get_2d_rotary_pos_embed(head_dim, region, (rows, columns), device=latents.device, output_type="pt")


def _region(rows: int, columns: int, base: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid with its longer side resized to `base`, centred in a square of it: top left, bottom right."""
    longer = max(rows, columns)
    height, width = round(base / longer * rows), round(base / longer * columns)
    top, left = round((base - height) / 2), round((base - width) / 2)
    return (top, left), (top + height, left + width)


def extras(model: nn.Module) -> dict[str, Extra]:
    """The text of the bilingual CLIP and its mask."""
    return streams(FAMILY.CLASS_NAME, model)


FAMILY = Family("HunyuanDiT2DModel", predict, lists=("blocks",), extras=extras)
