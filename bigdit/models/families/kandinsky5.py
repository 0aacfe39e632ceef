"""Kandinsky 5.0 Video: text refined by attention, then self-attention over a video and cross-attention to that text.

Its attention has no masks: samples are attended one by one, each caption without padding. Its input has channels for a
first frame and a mask, which are zeros here.

Source: Kandinsky Lab, arXiv:2511.14993; diffusers' Kandinsky5Transformer3DModel and Kandinsky5T2VPipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bigdit.errors import UserError
from bigdit.models.family import Conditions, Extra, Family, arguments, text
from bigdit.models.packing import Unpadded, padded

TIMESTEP_SCALE = 1000.0
VAE_SIDE = 8
# Scales of the distance of rows and columns in the pipeline, for videos of 480p and for others.
SIDES_480P, SCALE_480P, SCALE = (480, 854), (1, 2, 2), (1, 3.16, 3.16)


class ToText(Unpadded):
    """Attention of a caption's tokens to each other, or of a video to them."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        sparse_params: Any = None,
    ) -> torch.Tensor:
        if encoder_hidden_states is not None:
            pairs = zip(hidden_states.split(1), encoder_hidden_states.split(1), self.tokens, strict=True)
            return torch.cat([self.whole(attn, video, own[:, :n]) for video, own, n in pairs])
        assert rotary_emb is not None
        samples = zip(hidden_states.split(1), self.tokens, strict=True)
        rows = [self.whole(attn, own[:, :n], rotary_emb=rotary_emb[:, :n]) for own, n in samples]
        return padded(rows, hidden_states.shape[1])


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Velocity [B, C, F, H, W] for latents of that shape, t [B], text_embeds [B, T, D], text_mask [B, T], and the extra
    pooled_text [B, D'].

    It reads how many tokens each mask has, which waits for the device.
    """
    embeds, mask = text(conditions)
    _to_text(model).tokens = mask.bool().sum(1).tolist()
    _, channels, *sides = latents.shape
    if arguments(model).visual_cond:
        latents = F.pad(latents, (0, 0, 0, 0, 0, 0, 0, channels + 1))
    frames, height, width = (
        torch.arange(side // patch, device=latents.device)
        for side, patch in zip(sides, arguments(model).patch_size, strict=True)
    )
    within = all(SIDES_480P[0] <= VAE_SIDE * side <= SIDES_480P[1] for side in sides[1:])
    velocity = model(
        hidden_states=latents.permute(0, 2, 3, 4, 1),
        encoder_hidden_states=embeds,
        timestep=t * TIMESTEP_SCALE,
        pooled_projections=conditions.extras["pooled_text"],
        visual_rope_pos=(frames, height, width),
        text_rope_pos=torch.arange(embeds.shape[1], device=latents.device),
        scale_factor=SCALE_480P if within else SCALE,
        return_dict=False,
    )
    return velocity.permute(0, 4, 1, 2, 3)


def _to_text(model: Any) -> ToText:
    """The attention to text that all blocks share."""
    attentions = [block.self_attention for block in model.text_transformer_blocks]
    attentions += [block.cross_attention for block in model.visual_transformer_blocks]
    before = attentions[0].processor
    attention = ToText.of(attentions)
    if attention is not before:  # once: sines and cosines come in fp32, whatever the weights are
        model.time_embeddings.in_layer.register_forward_pre_hook(lambda layer, given: (given[0].to(layer.bias.dtype),))
    return attention


def extras(model: nn.Module) -> dict[str, Extra]:
    """`pooled_text` of CLIP. Raises UserError for sparse attention, whose memory depends on values."""
    config = arguments(model)
    if config.attention_type != "regular":
        raise UserError(
            f"model.kwargs.attention_type is {config.attention_type}, and the adapter of {FAMILY.CLASS_NAME} attends "
            "to all of a video; use regular, as its models of 5 seconds have it"
        )
    return {"pooled_text": Extra((config.in_text_dim2,))}


FAMILY = Family(
    "Kandinsky5Transformer3DModel",
    predict,
    lists=("text_transformer_blocks", "visual_transformer_blocks"),
    extras=extras,
)
