"""What differs between families of transformers: how a model is called, its conditions, and its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from bigdit.catalog.families import CONTROLNET, FAMILIES, IMAGE_CONDITION, REFERENCE, mask_of, stream_shapes
from bigdit.errors import UserError
from bigdit.models import packing
from bigdit.strategy import BatchShape


class Conditions(Protocol):
    """text_embeds [B, T, D] and text_mask [B, T] (1 = token, 0 = padding), None without text; `extras` by name."""

    @property
    def text_embeds(self) -> torch.Tensor | None: ...

    @property
    def text_mask(self) -> torch.Tensor | None: ...

    @property
    def extras(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Extra:
    """A further input: its shape for one sample, without the batch. Floats come in the compute dtype.

    `per_latent`: `shape` has only channels; frames, height and width are those of the latents. `fill`: the value if
    only shapes matter, 1 for a mask.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    fill: int = 0
    per_latent: bool = False

    def sample_shape(self, latents: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one sample's input for these latents."""
        return (*self.shape, *latents[1:]) if self.per_latent else self.shape


@dataclass(frozen=True)
class Family:
    """How bigdit drives a class of models.

    `predict`: the output, of the latents' shape, or with twice the channels if it has a variance; t [B] in [0, 1], 1 =
    noise. `lists`: the lists of blocks, in the order of the forward pass. `extras`: what a batch has besides latents
    and text, by name: `pooled_text`, `class_label`, … `first`: what it also has for videos that begin with an image, if
    models of the class can do without. `prepare`: called on a new model.

    `shared`: modules within a block that the model also calls from outside (DiT). Engines that shard by block gather a
    block's weights only while it runs. `unread`: the output of the last block that is not used, so that some weights of
    that block have no gradient.
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
        """The blocks in the order of the forward pass, then those of a ControlNet: units of checkpointing and
        sharding."""
        parts = [model, *(each for name, each in model.named_children() if name == CONTROLNET)]
        return [block for part in parts for name in self.lists for block in getattr(part, name, ())]

    def tokens(self, model: nn.Module, latents: torch.Size) -> int:
        """The tokens of each sample of latents [B, C, H, W] or [B, C, F, H, W]."""
        given = arguments(model)
        side: Any = getattr(given, "patch_size", None) or getattr(given, "all_patch_size", 1)
        side = side if isinstance(side, int) else side[-1]
        return math.prod(latents[2:]) // (packing.FACTOR if FAMILIES[self.CLASS_NAME].packs else side) ** 2


CONTROL_IMAGE = "controlnet_cond"
"""The argument of a ControlNet for its image."""


def control(
    model: nn.Module,
    conditions: Conditions,
    prepare: Callable[[torch.Tensor], torch.Tensor] = lambda image: image,
) -> dict[str, torch.Tensor]:
    """The ControlNet's argument for its image: `prepare` of the latents [B, C, H, W]; empty without a ControlNet."""
    if not hasattr(getattr(model, "module", model), CONTROLNET):
        return {}
    return {CONTROL_IMAGE: prepare(conditions.extras[REFERENCE][:, 0])}


def arguments(model: nn.Module) -> Any:
    """The model's constructor arguments as attributes, also within DeepSpeed's wrapper, which has another `config`."""
    return getattr(model, "module", model).config


def streams(class_name: str, model: nn.Module) -> dict[str, Extra]:
    """The further texts of a model and their masks, from the catalogue."""
    extras: dict[str, Extra] = {}
    for name, shape in stream_shapes(class_name, arguments(model)).items():
        extras |= {name: Extra(shape), mask_of(name): Extra(shape[:1], fill=1)}
    return extras


def images(family: Family, model: nn.Module, sample: BatchShape) -> dict[str, Extra]:
    """The references and the first frame of a sample, if it has them."""
    shape = sample.reference or sample.latents
    found = {REFERENCE: Extra((sample.references, *shape))} if sample.references else {}
    return found | (family.first(model) if sample.first_frame else {})


def given_first_frame(latents: torch.Tensor, conditions: Conditions) -> torch.Tensor | None:
    """Latents [B, C, F, H, W] whose first frame replaces that of the video; zeros for samples without a given one.

    None without any, for a model with further channels for it, and for images, which are videos of one frame.
    """
    given = conditions.extras.get(IMAGE_CONDITION)
    return given if given is not None and given.shape[:3] == latents.shape[:3] and latents.shape[2] > 1 else None


def has_first_frame(given: torch.Tensor) -> torch.Tensor:
    """Which samples have a given first frame: bool [B, 1, 1, 1, 1]."""
    return given[:, :, 0].flatten(1).ne(0).any(dim=1).view(-1, 1, 1, 1, 1)


def with_first_frame(
    latents: torch.Tensor, t: torch.Tensor, given: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents with the first frame of `given`, and the t of each token [B, frames · tokens], 0 in that frame.

    `tokens`: the number for each frame.
    """
    there = has_first_frame(given)
    shown = torch.cat([torch.where(there, given[:, :, :1], latents[:, :, :1]), latents[:, :, 1:]], dim=2)
    moves = torch.arange(latents.shape[2] * tokens, device=t.device) >= tokens
    return shown, t[:, None] * (moves | ~there.view(-1, 1)).to(t.dtype)


LEAST_T = 1e-4


def with_known_velocity(
    velocity: torch.Tensor, latents: torch.Tensor, t: torch.Tensor, given: torch.Tensor
) -> torch.Tensor:
    """The velocity; that of a given first frame is the one that leads to it."""
    known = (latents[:, :, :1] - given[:, :, :1]) / t.clamp(min=LEAST_T).view(-1, 1, 1, 1, 1)
    first = torch.where(has_first_frame(given), known.to(velocity.dtype), velocity[:, :, :1])
    return torch.cat([first, velocity[:, :, 1:]], dim=2)


def text(conditions: Conditions) -> tuple[torch.Tensor, torch.Tensor]:
    """text_embeds and text_mask. Raises UserError if there are none."""
    if conditions.text_embeds is None or conditions.text_mask is None:
        raise UserError("the model is conditioned on text, and the batch has none; extract features with captions")
    return conditions.text_embeds, conditions.text_mask


def guidance(
    model: nn.Module, latents: torch.Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor | None:
    """The guidance [B] that a guidance-distilled model embeds; None for another model.

    Training uses guidance 1, the prediction without extrapolation. `scale`: the pipeline's factor.
    """
    if not arguments(model).guidance_embeds:
        return None
    return torch.full(latents.shape[:1], scale, dtype=dtype, device=latents.device)


def take_through(model: nn.Module, family: Family, sample: BatchShape) -> None:
    """Call a model on the meta device with one `sample`. Raises torch's RuntimeError if shapes do not fit, or if the
    model reads values, such as those of a mask."""
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
