"""What differs between transformer families: how the model is called, and which modules are its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bigdit.models.conditions import Conditions, Extra


@dataclass(frozen=True)
class Family:
    """A class of models, as one module of bigdit/models/families says it.

    `predict` is the model's prediction, of the latents' shape; t [B] in [0, 1], 1 = noise. `lists` are its lists of
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
