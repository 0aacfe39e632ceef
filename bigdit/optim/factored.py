"""Second moments as the means of rows and columns (Shazeer & Stern, arXiv:1804.04235, §3).

A weight [O, ...] is treated as the matrix [O, rest], also that of a convolution. Its rows may be sharded (a DTensor of
FSDP2). Statistics have O + rest numbers, moments O × rest. `add_to` is the last line of an optimizer step, for fp32
weights, or bf16 ones without fp32 masters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(weight: DTensor) -> int:
    """The number of this process's first row. FSDP2 shards rows, so that a process has consecutive ones."""
    _, (row, *_) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return int(row)


def sum_over_shards(part: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """`part`, computed from this process's rows of `of`, summed in place over the processes that hold the others."""
    if isinstance(of, DTensor):
        for dim, placement in enumerate(of.placements):
            if placement.is_shard() and of.device_mesh.size(dim) > 1:  # a group of one would make a communicator
                dist.all_reduce(part, group=of.device_mesh.get_group(dim))
    return part


def rms(values: torch.Tensor, of: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    """The root of the mean square over the whole of `of`, a scalar; `values`: this process's part of it."""
    norm = torch.linalg.vector_norm(values, dtype=torch.float32)
    if isinstance(of, DTensor):
        norm = sum_over_shards(norm.square_(), of).sqrt_()
    return norm.mul_(times * of.numel() ** -0.5)


def add_to(param: torch.Tensor, update: torch.Tensor, times: float, decay: float, stochastic: bool) -> None:
    """param ← decay · param + times · update, in place; fp32 `update` is overwritten.

    `stochastic`: bf16 weights are rounded up with the probability that makes the expectation exact, so that small
    updates, below half a bf16 step, are not lost.
    """
    param = local(param)
    update = update.view(param.shape)
    if stochastic and param.dtype == torch.bfloat16:
        if times != 1:
            update.mul_(times)
        param.copy_(round_to_bf16_(update.add_(param, alpha=decay)))
        return
    if decay != 1:
        param.mul_(decay)
    param.add_(update, alpha=times)


def round_to_bf16_(values: torch.Tensor) -> torch.Tensor:
    """Round each fp32 value to one of its two bf16 neighbours, in place; the nearer one is more likely."""
    # bf16 is the upper half of the bits. Uniform 16 bits, added to the lower half, carry with that probability.
    bits = values.view(torch.int32)
    noise = torch.randint(-(2**15), 2**15, bits.shape, dtype=torch.int16, device=bits.device)
    bits.add_(noise).add_(2**15).bitwise_and_(-(2**16))
    return values


State = dict[str, Any]


def factors(param: torch.Tensor) -> bool:
    """Whether `param` is a matrix of several rows and columns; vectors and flat partitions are not."""
    return param.dim() > 1 and 1 < param.shape[0] < param.numel()


def as_matrix(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A new contiguous fp32 copy of this process's part of `grad`: [rows, rest] where `param` factors."""
    copy = local(grad).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return copy.view(copy.shape[0], param.numel() // param.shape[0]) if factors(param) else copy


def start(state: State, name: str, matrix: torch.Tensor) -> None:
    """Zero statistics for `matrix`, fp32, as `<name>_row` and `<name>_col`."""
    state[f"{name}_row"] = matrix.new_zeros(matrix.shape[0])
    state[f"{name}_col"] = matrix.new_zeros(matrix.shape[1])


def update(state: State, name: str, matrix: torch.Tensor, param: torch.Tensor, weight: float, eps: float) -> None:
    """Move the statistics by `weight` towards those of matrix² + eps (Algorithm 4, lines 4 and 5, with means
    for sums)."""
    row = torch.linalg.vector_norm(matrix, dim=1)
    squares = sum_over_shards(torch.linalg.vector_norm(matrix, dim=0).square_(), param)
    state[f"{name}_row"].mul_(1 - weight).addcmul_(row, row, value=weight / matrix.shape[1]).add_(weight * eps)
    state[f"{name}_col"].mul_(1 - weight).add_(squares, alpha=weight / param.shape[0]).add_(weight * eps)


def divide_by_root_(matrix: torch.Tensor, state: State, name: str) -> torch.Tensor:
    """matrix / √V with V = row ⊗ col / mean (Algorithm 4, lines 6 and 7), in place."""
    row, col = state[f"{name}_row"], state[f"{name}_col"]
    # The mean of all is the mean of col as of row, and col is whole on every process.
    return matrix.mul_((row / col.mean()).rsqrt_().unsqueeze(1)).mul_(col.rsqrt())


def excess(values: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """max(1, RMS(values)), a scalar: what an update is divided by (§6, with d = 1)."""
    return rms(values, param).clamp_(min=1)
