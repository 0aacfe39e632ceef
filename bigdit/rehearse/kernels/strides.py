"""Strides along dimensions of one element, where FakeTensorMode chooses them otherwise than torch does.

Nobody steps along such a dimension, but layouts are read from strides: with a batch of one, the same tensor
counts as channels last by one choice and as contiguous by the other, which decides about later copies.
Shown by the referee's row of Sana on an A40, engine single.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """`aten.view` with the strides of the real one."""
    result = aten.view.default(tensor, size)
    if 1 not in result.shape or result.numel() == 0:
        return result
    strides = view_strides(tensor.shape, tensor.stride(), result.shape)
    return result if strides == result.stride() else result.as_strided(result.shape, strides)


def view_strides(shape: Sequence[int], strides: Sequence[int], view_shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a view that is possible, of a tensor with elements.

    Dimensions are taken from the last on in runs that lie contiguously in memory, those of one element with the
    run behind them; each run is shared out to as many dimensions of the view.
    Source: computeStride_impl in aten/src/ATen/TensorUtils.cpp.
    """
    found = [1] * len(view_shape)
    at = len(view_shape) - 1
    run = len(shape)  # the end of the run that is being collected
    for start in reversed(range(len(shape))):
        base = strides[run - 1]
        length = math.prod(shape[start:run])
        if start > 0 and (shape[start - 1] == 1 or strides[start - 1] == length * base):
            continue
        taken = 1
        while at >= 0 and (taken < length or view_shape[at] == 1):
            found[at] = taken * base
            taken *= view_shape[at]
            at -= 1
        run = start
    return tuple(found)


def with_number(func: Any) -> Callable[..., torch.Tensor]:
    """A binary operator of a tensor and a number: with the strides that the kernel gives its result."""

    def rule(one: Any, other: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = func(one, other, **options)
        tensor = one if isinstance(one, torch.Tensor) and one.dim() else other
        number = other if tensor is one else one
        if 1 not in result.shape or result.is_contiguous() or (isinstance(number, torch.Tensor) and number.dim()):
            return result
        strides = elementwise_strides(tensor.shape, tensor.stride())
        if strides == result.stride():
            return result
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)

    return rule


def elementwise_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of the result for one tensor beside numbers, which keep TensorIterator from its fast set-ups.

    Dimensions keep the order of their strides, and are packed. Source: reorder_dimensions in
    aten/src/ATen/TensorIterator.cpp, an insertion sort from the last dimension on.
    """
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        here = start
        for before in reversed(range(start)):
            comes_first = _comes_first(shape, strides, order[here], order[before])
            if comes_first is False:
                break
            if comes_first:
                order[before], order[here] = order[here], order[before]
                here = before
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim], step = step, step * shape[dim]
    return tuple(found)


def _comes_first(shape: Sequence[int], strides: Sequence[int], dim: int, before: int) -> bool | None:
    """Whether `dim` is stepped along faster than `before`; None where nothing says so."""
    if not strides[dim] or not strides[before]:
        return None
    if strides[dim] == strides[before]:
        return True if shape[before] > shape[dim] else None
    return strides[before] > strides[dim]


RULES: dict[Any, Callable[..., torch.Tensor]] = {
    aten.view.default: view,
    **{func: with_number(func) for func in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)},
}
