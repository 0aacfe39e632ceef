"""What differs between transformer families: how the model is called, and which modules are its blocks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from bigdit.errors import UserError, nearest
from bigdit.models.conditions import Conditions, Extra
from bigdit.models.families import (
    auraflow,
    chroma,
    cogvideox,
    cogview4,
    dit,
    flux,
    flux2,
    hidream,
    hunyuan_image,
    hunyuan_video,
    hunyuandit,
    krea2,
    ltx,
    lumina2,
    lumina_next,
    paper_dit,
    pixart,
    prx,
    qwen_image,
    sana,
    sana_video,
    sd3,
    wan,
    z_image,
)


class Family(Protocol):
    """One module of bigdit/models/families a family; these four names are all that it provides.

    Where a model also calls modules of a block from outside of it, `shared(model)` lists them, for engines that
    shard by block. Only DiT has it.
    """

    CLASS_NAME: str

    def predict(self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """The model's prediction, of the latents' shape; `t` [B] in [0, 1], 1 = noise."""
        ...

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks in the order of the forward pass: units of checkpointing and of sharding."""
        ...

    def extras(self, model: nn.Module) -> dict[str, Extra]:
        """What a batch must carry beside latents and text, by name: `pooled_text`, `class_label`, …"""
        ...


_FAMILIES: dict[str, Family] = {
    module.CLASS_NAME: module
    for module in (
        auraflow,
        chroma,
        cogvideox,
        cogview4,
        dit,
        flux,
        flux2,
        hidream,
        hunyuan_image,
        hunyuan_video,
        hunyuandit,
        krea2,
        ltx,
        lumina2,
        lumina_next,
        paper_dit,
        pixart,
        prx,
        qwen_image,
        sana,
        sana_video,
        sd3,
        wan,
        z_image,
    )
}


def families() -> tuple[str, ...]:
    """The classes that can be rehearsed and trained."""
    return tuple(_FAMILIES)


def family(class_name: str) -> Family:
    """The adapter of a class. Raises UserError for a class without one."""
    if class_name not in _FAMILIES:
        raise UserError(f"no family adapter drives {class_name!r}; {nearest(class_name, _FAMILIES)}")
    return _FAMILIES[class_name]
