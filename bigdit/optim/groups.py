"""Parameter groups: which parameters have weight decay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from bigdit.strategy import OptimizerSpec

Groups = list[torch.Tensor] | list[dict[str, Any]]
"""As torch's optimizers take them."""


def groups(spec: OptimizerSpec, model: nn.Module, masters: Sequence[torch.Tensor] | None = None) -> Groups:
    """The trained parameters of `model`, grouped by whether they decay; or `masters`, one for each of them in their
    order.

    By `spec.decayed` all decay, in one group, or matrices alone: weights of linear layers and convolutions. Norms,
    biases, tables and embeddings do not. Modules decide it, because engines shard and flatten parameters.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    held = params if masters is None else list(masters)
    if spec.decayed == "all":
        return held
    matrices = set(_matrices(model))
    apart: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for param, master in zip(params, held, strict=True):
        apart[param in matrices].append(master)
    decays = zip((True, False), (apart[True], apart[False]), strict=True)
    return [{"params": some, "weight_decay": spec.weight_decay if decayed else 0.0} for decayed, some in decays if some]


def _matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of linear layers and convolutions. Tensors hash by identity, so a set of them finds these objects."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, _ConvNd)):
            yield module.weight
