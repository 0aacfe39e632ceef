"""Blocks that return pieces of one tensor: the gradients of the pieces are joined, which is the gradient of the whole.

As slices, each gradient is copied into zeros of the whole's size, and these are added: a fill and a copy a piece, and a
sum. FLUX.1's single-stream blocks cut what they return into text and picture so. No number changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bigdit.models.family import Family


def join_gradients(model: nn.Module, family: Family) -> None:
    """Have each block return a split in the place of slices that follow each other and are all of a tensor.

    To be applied before checkpointing, whose recomputation is the block's own.
    """
    for block in family.blocks(model):
        block.forward = functools.partial(_split, block.forward)


def _split(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    pieces = forward(*args, **kwargs)
    if not isinstance(pieces, tuple) or len(pieces) < 2 or not all(_is_slice(piece) for piece in pieces):
        return pieces
    whole = pieces[0]._base
    for dim in range(whole.dim()):
        sizes = [piece.shape[dim] for piece in pieces]
        if sum(sizes) == whole.shape[dim]:
            split = whole.split_with_sizes(sizes, dim)
            if all(map(_same_view, pieces, split)):
                return split
    return pieces


def _is_slice(piece: Any) -> bool:
    """Whether autograd has it as a slice of the tensor that it is a view of, with nothing between."""
    if not isinstance(piece, torch.Tensor) or piece.grad_fn is None or piece._base is None:
        return False
    whole = piece._base.grad_fn
    return piece.grad_fn.name() == "SliceBackward0" and piece.grad_fn.next_functions[0][0] is whole is not None


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one._base is other._base and one.storage_offset() == other.storage_offset()
    return same and one.shape == other.shape and one.stride() == other.stride()
