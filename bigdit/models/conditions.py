"""What a model is conditioned on beside latents and t."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from bigdit.catalog.families import mask_of, stream_shapes
from bigdit.errors import UserError
from bigdit.models.arguments import arguments


class Conditions(Protocol):
    """text_embeds [B, T, D] and text_mask [B, T] (1 = token, 0 = padding), None for a model without text;
    `extras`: the further inputs that the family names."""

    @property
    def text_embeds(self) -> torch.Tensor | None: ...

    @property
    def text_mask(self) -> torch.Tensor | None: ...

    @property
    def extras(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Extra:
    """One further input: the shape of a sample's, without the batch; floats come in the compute dtype.

    `per_latent`: `shape` is channels alone, and the sample's latents say the rest: frames, height, width.
    `fill`: its value where only shapes matter, 1 for a mask.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    fill: int = 0
    per_latent: bool = False

    def sample_shape(self, latents: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a sample's input, for a sample with latents of this shape."""
        return (*self.shape, *latents[1:]) if self.per_latent else self.shape


def streams(class_name: str, model: nn.Module) -> dict[str, Extra]:
    """The further texts of a model, and the mask of each, as the catalogue has them."""
    extras: dict[str, Extra] = {}
    for name, shape in stream_shapes(class_name, arguments(model)).items():
        extras |= {name: Extra(shape), mask_of(name): Extra(shape[:1], fill=1)}
    return extras


def text(conditions: Conditions) -> tuple[torch.Tensor, torch.Tensor]:
    """text_embeds and text_mask, for a model that cannot do without. Raises UserError where there are none."""
    if conditions.text_embeds is None or conditions.text_mask is None:
        raise UserError("the model is conditioned on text, and the batch has none; extract features with captions")
    return conditions.text_embeds, conditions.text_mask


def guidance(
    model: nn.Module, latents: torch.Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor | None:
    """The guidance [B] that a guidance-distilled model embeds, None for another.

    It is trained at guidance 1: the prediction itself, with nothing to extrapolate. `scale` is what its pipeline
    makes of 1.
    """
    if not arguments(model).guidance_embeds:
        return None
    return torch.full(latents.shape[:1], scale, dtype=dtype, device=latents.device)
