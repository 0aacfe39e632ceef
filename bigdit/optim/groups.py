"""Parameter groups: which parameters have weight decay, and which of them Muon steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from bigdit.strategy import OptimizerSpec

LR_FACTOR = "lr_factor"
"""The key of a group's factor of the learning rate."""

Groups = list[torch.Tensor] | list[dict[str, Any]]
"""Parameters or groups, as for torch's optimizers."""


def groups(
    spec: OptimizerSpec,
    model: nn.Module,
    masters: Sequence[torch.Tensor] | None = None,
    *,
    blocks: Iterable[nn.Module] = (),
    slower: nn.Module | None = None,
    lr_factor: float = 1.0,
) -> Groups:
    """The trained parameters of `model` in groups with and without weight decay; or `masters`, one for each in order.

    With `spec.decayed` all there is one group. With matrices only weights of linear layers and convolutions decay. This
    depends on modules, because engines shard and flatten parameters. With muon the weights of linear layers in `blocks`
    are a group with `muon` set. Parameters of `slower` are groups with `lr_factor`.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    held = params if masters is None else list(masters)
    others = set() if slower is None or lr_factor == 1 else set(slower.parameters())
    if spec.decayed == "all" and spec.name != "muon" and not others:
        return held
    matrices = set(_matrices(model))
    inner = {param for block in blocks for param in _matrices(block) if param.dim() == 2}
    apart: dict[tuple[bool, bool, bool], list[torch.Tensor]] = {
        each: [] for each in itertools.product((False, True), (True, False), (True, False))
    }
    for param, master in zip(params, held, strict=True):
        muon = spec.name == "muon" and param in inner
        apart[param in others, muon, spec.decayed == "all" or param in matrices].append(master)
    return [
        {"params": some, "weight_decay": spec.weight_decay if decayed else 0.0}
        | ({"muon": True} if muon else {})
        | ({LR_FACTOR: lr_factor, "lr": spec.lr * lr_factor} if slow else {})
        for (slow, muon, decayed), some in apart.items()
        if some
    ]


def _matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of linear layers and convolutions. Tensors hash by identity, so sets of them work."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, _ConvNd)):
            yield module.weight
