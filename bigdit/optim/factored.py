"""Second moments kept as the means of rows and columns (Shazeer & Stern, arXiv:1804.04235, §3).

A weight [O, ...] is seen as the matrix [O, rest]: a 1×1 convolution is factored as the linear layer that it is.
Its rows may be sharded (shards.py). The statistics take O + rest numbers where the moments take O × rest.
"""

from __future__ import annotations

from typing import Any

import torch

from bigdit.optim.shards import local, rms, sum_over_shards

State = dict[str, Any]


def factors(param: torch.Tensor) -> bool:
    """Whether `param` is a matrix of several rows and columns; vectors, and flat partitions, are not."""
    return param.dim() > 1 and 1 < param.shape[0] < param.numel()


def as_matrix(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A new contiguous fp32 copy of this process's part of `grad`: [rows, rest] where `param` factors."""
    copy = local(grad).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return copy.view(copy.shape[0], param.numel() // param.shape[0]) if factors(param) else copy


def start(state: State, name: str, matrix: torch.Tensor) -> None:
    """Zero statistics of `matrix`, fp32, as `<name>_row` and `<name>_col`."""
    state[f"{name}_row"] = matrix.new_zeros(matrix.shape[0])
    state[f"{name}_col"] = matrix.new_zeros(matrix.shape[1])


def update(state: State, name: str, matrix: torch.Tensor, param: torch.Tensor, weight: float, eps: float) -> None:
    """Move the statistics by `weight` towards those of matrix² + eps (Algorithm 4, lines 4 and 5, with means
    for sums)."""
    row = torch.linalg.vector_norm(matrix, dim=1).square_().div_(matrix.shape[1]).add_(eps)
    col = sum_over_shards(torch.linalg.vector_norm(matrix, dim=0).square_(), param).div_(param.shape[0]).add_(eps)
    state[f"{name}_row"].lerp_(row, weight)
    state[f"{name}_col"].lerp_(col, weight)


def divide_by_root_(matrix: torch.Tensor, state: State, name: str) -> torch.Tensor:
    """matrix / √V with V = row ⊗ col / mean (Algorithm 4, lines 6 and 7), in place."""
    row, col = state[f"{name}_row"], state[f"{name}_col"]
    # The mean of all is the mean of col as of row, and col is whole on every process.
    return matrix.mul_((row / col.mean()).rsqrt_().unsqueeze(1)).mul_(col.rsqrt())


def clip_rms_(values: torch.Tensor, param: torch.Tensor, threshold: float) -> torch.Tensor:
    """values / max(1, RMS(values) / threshold) (§6), in place."""
    return values.div_(rms(values, param).div_(threshold).clamp_(min=1))
