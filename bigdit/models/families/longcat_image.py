"""LongCat-Image: FLUX.1's blocks, fed the states of Qwen2.5-VL and no vector; its positions follow the text's.

Source: Meituan's LongCat-Image; diffusers' LongCatImageTransformer2DModel and LongCatImagePipeline.
"""

from __future__ import annotations

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text
from bigdit.models.packing import FACTOR, diagonal, grid, pack, unpack

# Patches' rows and columns begin where the longest text ends, however long a text is.
TEXT_TOKENS = 512


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents [B, C, H, W], t [B], text_embeds [B, T, D]; H and W are even.

    Padding is attended to, as in the published training: there is no mask.
    """
    embeds, _ = text(conditions)
    height, width = latents.shape[2:]
    start = (1, TEXT_TOKENS, TEXT_TOKENS)
    tokens = model(
        hidden_states=pack(latents),
        encoder_hidden_states=embeds,
        timestep=t,
        img_ids=grid(1, height // FACTOR, width // FACTOR, start=start, device=latents.device),
        txt_ids=diagonal(embeds.shape[1], device=latents.device),
        return_dict=False,
    )[0]
    return unpack(tokens, height, width)


FAMILY = Family("LongCatImageTransformer2DModel", predict, lists=("transformer_blocks", "single_transformer_blocks"))
