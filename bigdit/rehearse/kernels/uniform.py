"""What a program may read of a tensor without data: the one value of all its elements, where it has one.

Models read their masks: how many tokens are real, whether any is padding. A rehearsal feeds full masks, made by
`torch.ones`; the value is followed from there through copies, views, reductions and comparisons, so that each
read hears what a real full mask would answer.
Shown by the referee's rows of Lumina-Image 2.0 and Z-Image.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

Value = bool | int | float
_ATTRIBUTE = "_bigdit_uniform"


def value_of(tensor: torch.Tensor) -> Value | None:
    """The value of every element; None where it is not known, or was changed in place, through a view too."""
    value, version = getattr(tensor, _ATTRIBUTE, (None, 0))
    return value if value is not None and tensor._version == version else None


def follow(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Note what `result = func(*args)` says about values."""
    rule = _RULES.get(func)
    if rule is not None:
        _note(result, rule(args, result))
    elif args and isinstance(args[0], list) and func._schema.is_mutable:  # _foreach_…_ leaves versions alone
        for tensor in filter(torch.is_tensor, args[0]):
            setattr(tensor, _ATTRIBUTE, (None, 0))


def _note(result: Any, value: Value | None) -> None:
    if value is None:
        return
    for tensor in result if isinstance(result, list | tuple) else (result,):
        kind = bool if tensor.dtype is torch.bool else float if tensor.is_floating_point() else int
        setattr(tensor, _ATTRIBUTE, (kind(value), tensor._version))


def _known(item: Any) -> Value | None:
    return value_of(item) if isinstance(item, torch.Tensor) else item if isinstance(item, bool | int | float) else None


def _one(args: Any, result: Any) -> Value:
    return 1


def _argument(position: int) -> Callable[[Any, Any], Value | None]:
    return lambda args, result: _known(args[position])


def _sum(args: Any, result: torch.Tensor) -> Value | None:
    value = _known(args[0])
    return None if value is None else value * (args[0].numel() // max(result.numel(), 1))


def _all(args: Any, result: Any) -> Value | None:
    return _known(args[0]) if args[0].numel() else True


def _apply(function: Callable[..., Value], *positions: int) -> Callable[[Any, Any], Value | None]:
    def rule(args: Any, result: Any) -> Value | None:
        values = [_known(args[position]) for position in positions]
        return None if None in values else function(*values)

    return rule


def _inverted(args: Any, result: torch.Tensor) -> Value | None:
    value = _known(args[0])
    return None if value is None or result.dtype is not torch.bool else not value


def _cat(args: Any, result: Any) -> Value | None:
    values = {_known(tensor) for tensor in args[0]}
    return values.pop() if len(values) == 1 else None


_SAME = (
    *(aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default),
    aten._pin_memory.default,
    *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.repeat.default, aten.permute.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.select.int, aten.slice.Tensor, aten.transpose.int),
    *(aten.unbind.int, aten.split.Tensor, aten.any.default, aten.any.dim, aten.all.dim),
    *(aten.max.default, aten.min.default, aten.amax.default, aten.amin.default, aten.mean.default),
)

_RULES: dict[Any, Callable[[Any, Any], Value | None]] = {
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _one),
    **dict.fromkeys((aten.full.default, aten.full_like.default), _argument(1)),
    aten.new_full.default: _argument(2),
    **dict.fromkeys(_SAME, _argument(0)),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _sum),
    **dict.fromkeys((aten.eq.Scalar, aten.eq.Tensor), _apply(operator.eq, 0, 1)),
    **dict.fromkeys((aten.ne.Scalar, aten.ne.Tensor), _apply(operator.ne, 0, 1)),
    **dict.fromkeys((aten.gt.Scalar, aten.gt.Tensor), _apply(operator.gt, 0, 1)),
    **dict.fromkeys((aten.ge.Scalar, aten.ge.Tensor), _apply(operator.ge, 0, 1)),
    **dict.fromkeys((aten.lt.Scalar, aten.lt.Tensor), _apply(operator.lt, 0, 1)),
    **dict.fromkeys((aten.le.Scalar, aten.le.Tensor), _apply(operator.le, 0, 1)),
    **dict.fromkeys((aten.mul.Tensor, aten.bitwise_and.Tensor), _apply(operator.mul, 0, 1)),
    aten.all.default: _all,
    aten.logical_not.default: _apply(operator.not_, 0),
    aten.bitwise_not.default: _inverted,
    aten.cat.default: _cat,
}
