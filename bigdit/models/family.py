"""What differs between transformer families: how the model is called, and which modules are its blocks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from bigdit.errors import UserError, nearest
from bigdit.models import sana


class Family(Protocol):
    """One module of bigdit/models a family; these three names are all that it provides."""

    CLASS_NAME: str

    def predict(
        self,
        model: nn.Module,
        latents: torch.Tensor,
        t: torch.Tensor,
        text_embeds: torch.Tensor,
        text_mask: torch.Tensor,
    ) -> torch.Tensor:
        """The model's prediction, of the latents' shape; `t` in [0, 1], `text_mask` 1 = token, 0 = padding."""
        ...

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks in the order of the forward pass: units of checkpointing and of sharding."""
        ...


_FAMILIES: dict[str, Family] = {module.CLASS_NAME: module for module in (sana,)}


def families() -> tuple[str, ...]:
    """The diffusers classes that can be rehearsed and trained."""
    return tuple(_FAMILIES)


def family(class_name: str) -> Family:
    """The adapter of a diffusers class. Raises UserError for a class without one."""
    if class_name not in _FAMILIES:
        raise UserError(f"no family adapter drives {class_name!r}; {nearest(class_name, _FAMILIES)}")
    return _FAMILIES[class_name]
