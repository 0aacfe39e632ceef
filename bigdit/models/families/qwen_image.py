"""Qwen-Image: dual-stream blocks over text of a language model and 2 × 2 patches, complex rotary positions.

Source: Wu et al., arXiv:2508.02324; diffusers' QwenImageTransformer2DModel, QwenImagePipeline, QwenImageEditPipeline
and QwenImageEditPlusPipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.catalog.families import REFERENCE
from bigdit.models.family import Conditions, Family, control, text
from bigdit.models.packing import FACTOR, pack, pack_edit, unpack


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T].

    The tokens of references follow, which may be of another size; what is predicted of them is dropped.
    """
    embeds, mask = text(conditions)
    batch, _, height, width = latents.shape
    controlled = control(model, conditions, pack)
    given = None if controlled else conditions.extras.get(REFERENCE)
    packed, references = pack_edit(latents, given)
    sizes = [(height, width), *([] if given is None else [(given.shape[-2], given.shape[-1])] * references)]
    tokens = model(
        hidden_states=packed,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask.bool(),
        timestep=t,
        img_shapes=[[(1, high // FACTOR, wide // FACTOR) for high, wide in sizes]] * batch,
        return_dict=False,
        **controlled,
    )[0]
    return unpack(tokens, height, width)


FAMILY = Family("QwenImageTransformer2DModel", predict, unread=0)
