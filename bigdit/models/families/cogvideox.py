"""CogVideoX: one sequence of text and video, full attention, an expert LayerNorm for each of the two.

Its checkpoints predict v of a variance-preserving process; here, as every model, it learns the flow's velocity.

5B's image-to-video model learns its positions. diffusers has them in a buffer; here they are a parameter.

Source: Yang et al., arXiv:2408.06072; diffusers' CogVideoXTransformer3DModel, CogVideoXPipeline and
CogVideoXImageToVideoPipeline; learnable_pos_embed in sat/dit_video_concat.py of THUDM/CogVideo.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import nn

from bigdit.catalog.families import IMAGE_CONDITION
from bigdit.models.family import Conditions, Extra, Family, arguments

TIMESTEP_SCALE = 1000.0
OFFSET = 2.0
"""A constant input of 1.5's image-to-video model. Source: CogVideoXImageToVideoPipeline."""


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], padded text attended to.

    Image to video: the extra image_condition, as `latents`, in further channels.
    """
    _, _, frames, height, width = latents.shape
    given = conditions.extras.get(IMAGE_CONDITION)
    return model(
        hidden_states=(latents if given is None else torch.cat([latents, given], dim=1)).transpose(1, 2),
        encoder_hidden_states=conditions.text_embeds,
        timestep=t * TIMESTEP_SCALE,
        ofs=latents.new_full((1,), OFFSET) if arguments(model).ofs_embed_dim else None,
        image_rotary_emb=_rotary(model, frames, height, width, latents.device),
        return_dict=False,
    )[0].transpose(1, 2)


def _rotary(
    model: nn.Module, frames: int, height: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines [F · H/p · W/p, head dim]; None where the model adds its positions."""
    config = arguments(model)
    if not config.use_rotary_positional_embeddings:
        return None
    patch = config.patch_size
    grid, base = (height // patch, width // patch), (config.sample_height // patch, config.sample_width // patch)
    if config.patch_size_t is None:
        return get_3d_rotary_pos_embed(
            config.attention_head_dim, _fitted(grid, base), grid, temporal_size=frames, device=device
        )
    return get_3d_rotary_pos_embed(  # CogVideoX 1.5
        config.attention_head_dim,
        None,
        grid,
        temporal_size=-(-frames // config.patch_size_t),
        grid_type="slice",
        max_size=base,
        device=device,
    )


def _fitted(grid: tuple[int, int], base: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The largest centred region of `base` with the sides' ratio of `grid`: top left, bottom right."""
    scale = min(base[0] / grid[0], base[1] / grid[1])
    sides = [round(side * scale) for side in grid]
    top, left = (round((whole - side) / 2) for whole, side in zip(base, sides, strict=True))
    return (top, left), (top + sides[0], left + sides[1])


def extras(model: nn.Module) -> dict[str, Extra]:
    """Image to video: `image_condition`, the latents of the first frame, and zeros."""
    config = arguments(model)
    more = config.in_channels - config.out_channels
    return {IMAGE_CONDITION: Extra((more,), per_latent=True)} if more > 0 else {}


def learn_positions(model: nn.Module) -> None:
    """Make learned positions a parameter, under the same name."""
    embed: Any = model.patch_embed
    if embed.use_learned_positional_embeddings:
        positions = embed.pos_embedding
        del embed.pos_embedding
        embed.pos_embedding = nn.Parameter(positions)


FAMILY = Family("CogVideoXTransformer3DModel", predict, extras=extras, prepare=learn_positions)
