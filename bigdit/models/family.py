"""What differs between families of transformers: how a model is called, its conditions, and its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from bigdit.catalog.conditions import CONTROLNET, IMAGE_CONDITION
from bigdit.catalog.families import FAMILIES, REFERENCE, mask_of, stream_shapes
from bigdit.errors import UserError
from bigdit.models import packing
from bigdit.strategy import BatchShape


class Conditions(Protocol):
    """text_embeds [B, T, D] and text_mask [B, T] (1 = token, 0 = padding), None for a model without text.

    `extras`: further inputs, by the names that the family gives them.
    """

    @property
    def text_embeds(self) -> torch.Tensor | None: ...

    @property
    def text_mask(self) -> torch.Tensor | None: ...

    @property
    def extras(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Extra:
    """A further input: its shape for one sample, without the batch. Floats come in the compute dtype.

    `per_latent`: `shape` is channels alone, and frames, height and width are those of the latents. `fill`: its value
    where only shapes matter, 1 for a mask.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    fill: int = 0
    per_latent: bool = False

    def sample_shape(self, latents: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a sample's input, for latents of this shape."""
        return (*self.shape, *latents[1:]) if self.per_latent else self.shape


@dataclass(frozen=True)
class Family:
    """A class of models, described by one module of bigdit/models/families.

    `predict`: the model's output, of the latents' shape, or with twice the channels where it has a variance too; t [B]
    in [0, 1], 1 = noise. `lists`: its lists of blocks, in the order of the forward pass. `extras`: what a batch must
    hold besides latents and text, by name: `pooled_text`, `class_label`, … `first`: what it holds too where videos
    begin with an image, of a class whose models can do without.

    `prepare`: what a new model needs before it is trained.

    `shared`: modules within a block that the model also calls from outside of it, which only DiT has. Engines that
    shard by block gather a block's weights only while it runs. `unread`: which output of the last block goes nowhere,
    so that weights of that block have no gradient.
    """

    CLASS_NAME: str
    predict: Callable[[nn.Module, torch.Tensor, torch.Tensor, Conditions], torch.Tensor]
    lists: tuple[str, ...] = ("transformer_blocks",)
    extras: Callable[[nn.Module], dict[str, Extra]] = lambda model: {}
    first: Callable[[nn.Module], dict[str, Extra]] = lambda model: {}
    prepare: Callable[[nn.Module], None] = lambda model: None
    shared: Callable[[nn.Module], list[nn.Module]] = lambda model: []
    unread: int | None = None

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks in the order of the forward pass, and those of a ControlNet: units of checkpointing and
        of sharding."""
        parts = [model, *(each for name, each in model.named_children() if name == CONTROLNET)]
        return [block for part in parts for name in self.lists for block in getattr(part, name, ())]

    def tokens(self, model: nn.Module, latents: torch.Size) -> int:
        """How many tokens the model makes of each sample of latents [B, C, (F,) H, W]."""
        given = arguments(model)
        side: Any = getattr(given, "patch_size", None) or getattr(given, "all_patch_size", 1)
        side = side if isinstance(side, int) else side[-1]
        return math.prod(latents[2:]) // (packing.FACTOR if FAMILIES[self.CLASS_NAME].packs else side) ** 2


CONTROL_IMAGE = "controlnet_cond"
"""The argument of a ControlNet for its image."""


def control(
    model: nn.Module,
    conditions: Conditions,
    fed: Callable[[torch.Tensor], torch.Tensor] = lambda image: image,
) -> dict[str, torch.Tensor]:
    """The argument for the image of a ControlNet, whose latents [B, C, H, W] are `fed` to it; none where the model has
    no ControlNet."""
    if not hasattr(getattr(model, "module", model), CONTROLNET):
        return {}
    return {CONTROL_IMAGE: fed(conditions.extras[REFERENCE][:, 0])}


def arguments(model: nn.Module) -> Any:
    """The model's constructor arguments as attributes, also behind DeepSpeed's wrapper, whose `config` is its own."""
    return getattr(model, "module", model).config


def streams(class_name: str, model: nn.Module) -> dict[str, Extra]:
    """The further texts of a model, and the mask of each, as the catalogue lists them."""
    extras: dict[str, Extra] = {}
    for name, shape in stream_shapes(class_name, arguments(model)).items():
        extras |= {name: Extra(shape), mask_of(name): Extra(shape[:1], fill=1)}
    return extras


def images(family: Family, model: nn.Module, sample: BatchShape) -> dict[str, Extra]:
    """The latents of the images that a sample is an edit of, or its first frame, if it has them."""
    shape = sample.reference or sample.latents
    found = {REFERENCE: Extra((sample.references, *shape))} if sample.references else {}
    return found | (family.first(model) if sample.first_frame else {})


def kept_first(latents: torch.Tensor, conditions: Conditions) -> torch.Tensor | None:
    """The latents [B, C, F, H, W] of a given first frame that takes the place of the video's own, zeros of a sample
    without; None where none is given, of a model with further channels for one, and of an image, a video of one
    frame."""
    given = conditions.extras.get(IMAGE_CONDITION)
    return given if given is not None and given.shape[:3] == latents.shape[:3] and latents.shape[2] > 1 else None


def is_given(given: torch.Tensor) -> torch.Tensor:
    """Which samples have a first frame in `kept_first`: bool [B, 1, 1, 1, 1]."""
    return given[:, :, 0].flatten(1).ne(0).any(dim=1).view(-1, 1, 1, 1, 1)


def shown_first(
    latents: torch.Tensor, t: torch.Tensor, given: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents with the first frame of `given`, and the t of each token [B, frames · tokens], 0 in that frame.
    `tokens`: of a frame."""
    there = is_given(given)
    shown = torch.cat([torch.where(there, given[:, :, :1], latents[:, :, :1]), latents[:, :, 1:]], dim=2)
    moves = torch.arange(latents.shape[2] * tokens, device=t.device) >= tokens
    return shown, t[:, None] * (moves | ~there.view(-1, 1)).to(t.dtype)


LEAST_T = 1e-4


def known_first(velocity: torch.Tensor, latents: torch.Tensor, t: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """The velocity, of whose first frame it is known: that which leads to the given one."""
    known = (latents[:, :, :1] - given[:, :, :1]) / t.clamp(min=LEAST_T).view(-1, 1, 1, 1, 1)
    first = torch.where(is_given(given), known.to(velocity.dtype), velocity[:, :, :1])
    return torch.cat([first, velocity[:, :, 1:]], dim=2)


def text(conditions: Conditions) -> tuple[torch.Tensor, torch.Tensor]:
    """text_embeds and text_mask, for a model that needs them. Raises UserError where there are none."""
    if conditions.text_embeds is None or conditions.text_mask is None:
        raise UserError("the model is conditioned on text, and the batch has none; extract features with captions")
    return conditions.text_embeds, conditions.text_mask


def guidance(
    model: nn.Module, latents: torch.Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor | None:
    """The guidance [B] that a guidance-distilled model embeds; None for another model.

    It is trained at guidance 1: the prediction itself, without extrapolation. `scale`: what its pipeline makes of 1.
    """
    if not arguments(model).guidance_embeds:
        return None
    return torch.full(latents.shape[:1], scale, dtype=dtype, device=latents.device)


def take_through(model: nn.Module, family: Family, sample: BatchShape) -> None:
    """Have a model on the meta device predict from one `sample`. Raises what the model raises: torch's RuntimeError
    where shapes do not fit, and where values are read, such as a mask's, which the meta device lacks."""
    text = sample.text
    with torch.device("meta"), torch.no_grad():
        conditions = SimpleNamespace(
            text_embeds=None if text is None else torch.zeros(1, *text),
            text_mask=None if text is None else torch.ones(1, text[0]),
            extras={
                name: torch.full((1, *each.sample_shape(sample.latents)), each.fill, dtype=each.dtype)
                for name, each in (family.extras(model) | images(family, model, sample)).items()
            },
        )
        family.predict(model, torch.zeros(1, *sample.latents), torch.full((1,), 0.5), conditions)
