"""Statistics of a tensor of which this process holds some rows (a DTensor of FSDP2), or all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_over_shards(part: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """`part`, computed of this process's rows of `of`, summed in place over the processes that hold the others."""
    if isinstance(of, DTensor):
        for dim, placement in enumerate(of.placements):
            if placement.is_shard() and of.device_mesh.size(dim) > 1:  # alone it would make a communicator for nothing
                dist.all_reduce(part, group=of.device_mesh.get_group(dim))
    return part


def rms(values: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The root of the mean square over the whole of `of`; `values` are of this process's part. A scalar."""
    squares = torch.linalg.vector_norm(values, dtype=torch.float32).square_()
    return sum_over_shards(squares, of).div_(of.numel()).sqrt_()
