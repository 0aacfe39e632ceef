"""Masked indexing, whose sizes are data: how many elements of a mask are true, and what follows from it.

Text is full, and its masks say so (uniform.py). A mixture of experts picks k of E experts for each token and asks
which tokens each of them has got. Here each has got the same, the first ones one more where that does not divide:
every token goes to k experts, so that what they hold together is exact; how a real router divides it changes with
every batch, and with it only the temporaries of the largest.
Shown by the rows of HiDream-I1: 0.3 % less than on a real H100 (benchmarks/gpu_matrix.md), 6 to 9 % more than on an
emulated card, which has no values to choose by (benchmarks/referee.md).
"""

from __future__ import annotations

from typing import Any

import torch

from bigdit.rehearse.kernels.uniform import value_of

aten = torch.ops.aten

_EXPERTS = "_bigdit_experts"  # on the storage of chosen indices, which their views share
_TRUE = "_bigdit_true"  # on a mask


def topk(scores: torch.Tensor, k: int, dim: int = -1, *options: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices are of as many things as there are scores."""
    values, indices = aten.topk.default(scores, k, dim, *options, **named)
    setattr(indices.untyped_storage(), _EXPERTS, scores.shape[dim])
    return values, indices


def equal(tensor: torch.Tensor, number: int | float) -> torch.Tensor:
    """Where chosen indices are `number`: an equal share of them."""
    mask = aten.eq.Scalar(tensor, number)
    experts = getattr(tensor.untyped_storage(), _EXPERTS, None)
    if experts is not None:
        share, rest = divmod(tensor.numel(), experts)
        setattr(mask, _TRUE, share + (number < rest))
    return mask


def index(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """`tensor[mask]` has a row for each true element."""
    return aten.index.Tensor(tensor, _without_masks(indices))


def index_put(
    tensor: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """A copy of `tensor` with values in it."""
    return aten.index_put.default(tensor, _without_masks(indices), values, accumulate)


def index_put_(
    tensor: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """`tensor[mask] = values`."""
    return aten.index_put_.default(tensor, _without_masks(indices), values, accumulate)


def nonzero(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask is true [count, dimensions], a dimension's positions one after another.

    Source: nonzero_cuda_out_impl in aten/src/ATen/native/cuda/Nonzero.cu, nonzero_out_cpu in
    aten/src/ATen/native/TensorAdvancedIndexing.cpp.
    """
    count = _count(mask)
    if count is None:
        return aten.nonzero.default(mask)  # which raises
    return torch.empty(mask.dim(), count, dtype=torch.int64, device=mask.device).t()


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`F.one_hot`, which computes otherwise where it meets a fake tensor.

    A CPU reads the extremes first, to check them; CUDA leaves that to the scatter.
    Source: aten/src/ATen/native/Onehot.cpp, torch 2.13.
    """
    if num_classes == -1:
        num_classes = int(tensor.max().item()) + 1  # as torch finds it: a read of data, which is refused by name
    if tensor.device.type == "cpu":
        torch.aminmax(tensor)
    hot = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype, device=tensor.device)
    return hot.scatter_(-1, tensor.unsqueeze(-1), 1)


def _without_masks(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """A mask of n dimensions is n lists of positions; one of which nothing is known stays, and raises."""
    positions: list[torch.Tensor | None] = []
    for item in indices:
        count = None if item is None or item.dtype is not torch.bool else _count(item)
        if item is None or count is None:
            positions.append(item)
        else:
            positions += [torch.empty(count, dtype=torch.int64, device=item.device) for _ in range(item.dim())]
    return positions


def _count(mask: torch.Tensor) -> int | None:
    value = value_of(mask) if mask.numel() else False
    return getattr(mask, _TRUE, None) if value is None else mask.numel() * int(value)
