"""CogView4: one sequence of text and image, conditioned on the picture's size.

Its attention has no mask that a kernel takes: each sample attends to its own text, without its padding.

Source: diffusers' CogView4Transformer2DModel and CogView4Pipeline (Zheng et al., arXiv:2403.05121, for the sizes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_cogview4 import CogView4AttnProcessor
from torch import nn
from torch.nn import functional as F

from bigdit.models.conditions import Conditions, text
from bigdit.models.family import Family

TIMESTEP_SCALE = 1000.0
# Pixels a latent: sizes are told in pixels.
DOWNSAMPLE = 8


class Unpadded(CogView4AttnProcessor):  # type: ignore[misc]
    """The class's own attention, of one sample after another, each with so many `tokens` of its text: also where all
    have as many, so that a plan has the memory of any."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: Sequence[int] = ()

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.tokens) == 1:  # whose padding is cut off
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        samples = zip(hidden_states.split(1), encoder_hidden_states.split(1), self.tokens, strict=True)
        images, texts = zip(
            *(
                super(Unpadded, self).__call__(attn, image, own[:, :n], image_rotary_emb=image_rotary_emb)
                for image, own, n in samples
            ),
            strict=True,
        )
        longest = encoder_hidden_states.shape[1]
        return torch.cat(images), torch.cat([F.pad(own, (0, 0, 0, longest - own.shape[1])) for own in texts])


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T].

    It reads how many tokens each mask has, which waits for the device.
    """
    embeds, mask = text(conditions)
    tokens = mask.bool().sum(1).tolist()
    _unpadded(model).tokens = tokens
    return of_sizes(model, latents, t, embeds[:, : max(tokens)])


def of_sizes(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """What a model that is conditioned on sizes predicts of whole, uncropped pictures, from all of a text."""
    batch, _, height, width = latents.shape
    pixels = torch.tensor([[height * DOWNSAMPLE, width * DOWNSAMPLE]], dtype=latents.dtype)
    size = pixels.to(latents.device, non_blocking=True).repeat(batch, 1)
    return model(
        hidden_states=latents,
        encoder_hidden_states=embeds,
        timestep=t * TIMESTEP_SCALE,
        original_size=size,
        target_size=size,
        crop_coords=torch.zeros_like(size),
        return_dict=False,
    )[0]


def _unpadded(model: Any) -> Unpadded:
    """The attention of all blocks, which they are given before the first pass."""
    found = model.transformer_blocks[0].attn1.processor
    if isinstance(found, Unpadded):
        return found
    made = Unpadded()
    for block in model.transformer_blocks:
        block.attn1.set_processor(made)
    return made


FAMILY = Family("CogView4Transformer2DModel", predict)
