"""CogView3-Plus and CogView4: one sequence of text and image, conditioned on the size in pixels.

CogView3-Plus attends to T5's padding. CogView4 does not, and no kernel takes its mask, so samples are attended one by
one.

Source: Zheng et al., arXiv:2403.05121; diffusers' CogView3PlusTransformer2DModel, CogView4Transformer2DModel and their
pipelines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bigdit.models.family import Conditions, Family, text
from bigdit.models.packing import Unpadded, padded

TIMESTEP_SCALE = 1000.0
# Pixels a latent: the model takes sizes in pixels.
DOWNSAMPLE = 8


class Joint(Unpadded):
    """Joint attention of image and text, sample by sample, even if all texts have the same length: so a plan's memory
    holds for all batches."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.tokens) == 1:  # its padding was cut off
            return self.whole(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        samples = zip(hidden_states.split(1), encoder_hidden_states.split(1), self.tokens, strict=True)
        images, texts = zip(
            *(self.whole(attn, image, own[:, :n], image_rotary_emb=image_rotary_emb) for image, own, n in samples),
            strict=True,
        )
        return torch.cat(images), padded(texts, encoder_hidden_states.shape[1])


def predict_plus(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D]; images are whole, uncropped."""
    embeds, _ = text(conditions)
    return of_sizes(model, latents, t, embeds)


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T].

    It reads how many tokens each mask has, which waits for the device.
    """
    embeds, mask = text(conditions)
    tokens = mask.bool().sum(1).tolist()
    Joint.of([block.attn1 for block in model.transformer_blocks]).tokens = tokens
    return of_sizes(model, latents, t, embeds[:, : max(tokens)])


def of_sizes(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """The prediction of a model that is conditioned on sizes, for uncropped images, from a whole text."""
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


PLUS = Family("CogView3PlusTransformer2DModel", predict_plus)
FAMILY = Family("CogView4Transformer2DModel", predict)
