"""Losses and norms of many tensors.

Shown by the referee's row of Sana on an A40, engine single.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bigdit.rehearse.kernels import TORCH
from bigdit.rehearse.scratch.launch import Launch, Rule
from bigdit.rehearse.scratch.layout import Layout
from bigdit.rehearse.scratch.reductions import total

aten = torch.ops.aten

_CHUNK = 65536


def _mse_loss(launch: Launch, input: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> None:
    """The squares of all differences beside the result, where that is their mean or sum.

    Source: TORCH_IMPL_FUNC(mse_loss_out) in aten/src/ATen/native/BinaryOps.cpp.
    """
    launch.results()
    if reduction == 0:
        return
    squares = Layout.dense((math.prod(torch.broadcast_shapes(input.shape, target.shape)),), launch.result.dtype)
    with launch.holding(squares.nbytes):
        total(launch, squares, (0,), squares.dtype)


def _foreach_norm(
    launch: Launch, tensors: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> None:
    """A partial norm for each chunk, of every tensor as many as of the longest one; since torch 2.15 as many as it has,
    behind a table of where those of each tensor begin.

    Source: foreach_tensor_norm_cuda in aten/src/ATen/native/cuda/ForeachReduceOp.cu; traces of 2.15.0 on
    emulated cards.
    """
    chunks = [-(-tensor.numel() // _CHUNK) for tensor in tensors]
    accumulated = torch.float64 if (dtype or tensors[0].dtype) == torch.float64 else torch.float32
    if TORCH < (2, 15):
        taken = [len(chunks) * max(chunks) * accumulated.itemsize]
    else:
        taken = [8 * (len(chunks) + 1), sum(chunks) * accumulated.itemsize]
    with launch.holding(*taken):
        launch.results()


RULES: dict[Any, Rule] = {
    aten.mse_loss.default: _mse_loss,
    aten._foreach_norm.Scalar: _foreach_norm,
}
