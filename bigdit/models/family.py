"""What differs between transformer families: how the model is called, and which modules are its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigdit.catalog.families import FAMILIES
from bigdit.models import packing
from bigdit.models.arguments import arguments
from bigdit.models.conditions import Conditions, Extra


@dataclass(frozen=True)
class Family:
    """A class of models, as one module of bigdit/models/families says it.

    `predict` is the model's output, of the latents' shape, or with twice the channels where a variance is beside the
    prediction; t [B] in [0, 1], 1 = noise. `lists` are its lists of
    blocks in the order of the forward pass. `extras` are what a batch must carry beside latents and text, by name:
    `pooled_text`, `class_label`, … `shared` are modules within a block that the model also calls from outside of it,
    which only DiT has: engines that shard by block gather a block's weights only while it runs.
    """

    CLASS_NAME: str
    predict: Callable[[nn.Module, torch.Tensor, torch.Tensor, Conditions], torch.Tensor]
    lists: tuple[str, ...] = ("transformer_blocks",)
    extras: Callable[[nn.Module], dict[str, Extra]] = lambda model: {}
    shared: Callable[[nn.Module], list[nn.Module]] = lambda model: []

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks in the order of the forward pass: units of checkpointing and of sharding."""
        return [block for name in self.lists for block in getattr(model, name)]

    def tokens(self, model: nn.Module, latents: torch.Size) -> int:
        """How many tokens the model makes of a sample of latents [B, C, (F,) H, W], each frame for itself."""
        given = arguments(model)
        side: Any = getattr(given, "patch_size", None) or getattr(given, "all_patch_size", 1)
        side = side if isinstance(side, int) else side[-1]
        return math.prod(latents[2:]) // (packing.FACTOR if FAMILIES[self.CLASS_NAME].packs else side) ** 2
