"""Two recorded steps with CAME as it was published: `python published_came.py REQUEST.json RESULT.json`.

The released code factors the last two dimensions of every weight. A 1×1 convolution [O, I, 1, 1] then keeps four
statistics of [O, I], where bigdit keeps four vectors. This file replaces bigdit's view by that, in a process of its own
on an emulated GPU, for benchmarks/scenarios.py. No strategy can ask for it.

Source: came_pytorch/CAME.py of github.com/yangluo7/CAME. Its temporaries are not copied: three of the size of one
weight, where bigdit has one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from bigdit import libraries
from bigdit.files import write_text
from bigdit.optim import factored
from bigdit.optim.factored import State
from bigdit.optim.shards import local
from bigdit.profile.recorded import recorded
from bigdit.profile.request import StepRequest


def factors(param: torch.Tensor) -> bool:
    """Every weight of two dimensions and more."""
    return bool(param.dim() > 1)


def as_it_is(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """An fp32 copy in the shape of the weight."""
    return local(grad).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def start(state: State, name: str, matrix: torch.Tensor) -> None:
    """Zero statistics over the last dimension, and over the one before it."""
    state[f"{name}_row"] = matrix.new_zeros(matrix.shape[:-1])
    state[f"{name}_col"] = matrix.new_zeros(matrix.shape[:-2] + matrix.shape[-1:])


def update(state: State, name: str, matrix: torch.Tensor, param: torch.Tensor, weight: float, eps: float) -> None:
    """Move the statistics towards those of matrix² + eps."""
    square = matrix.square().add_(eps)
    state[f"{name}_row"].lerp_(square.mean(-1), weight)
    state[f"{name}_col"].lerp_(square.mean(-2), weight)


def divide_by_root_(matrix: torch.Tensor, state: State, name: str) -> torch.Tensor:
    """matrix / √V, in place."""
    row, col = state[f"{name}_row"], state[f"{name}_col"]
    row = (row / row.mean(-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return matrix.mul_(row).mul_(col.rsqrt().unsqueeze(-2))


if __name__ == "__main__":
    libraries.prepare()
    factored.factors, factored.as_matrix = factors, as_it_is
    factored.start, factored.update, factored.divide_by_root_ = start, update, divide_by_root_
    found = recorded(StepRequest.model_validate_json(Path(sys.argv[1]).read_text()))
    write_text(Path(sys.argv[2]), found.model_dump_json())
    sys.stderr.flush()
    os._exit(0)  # threads of process groups may abort at exit
