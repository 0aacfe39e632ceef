"""What FSDP2 asks of real tensors and of its peers, answered where neither are there."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop


def do_without_data() -> None:
    """Let FSDP2 start on fake tensors, as the first of any number of processes. To be called before it is."""
    # At its first step it compares addresses, to learn whether the shards that it padded and pinned are still the
    # model's parameters, and makes them anew where they are not. Nothing replaces them in a rehearsal.
    _fsdp_param.FSDPParam.reset_sharded_param = _same
    _fsdp_param._chunk_with_empty = _first_chunk
    do_without_strided_shards()


def do_without_strided_shards() -> None:
    """For each tensor of an operation on lists torch looks at all of them, in search of shards that FSDP2 alone never
    makes; of a thousand weights that would be half of a rehearsal. Torch before 2.13 does not look."""
    _sharding_prop._propagate_use_strided_shard_flag = _no_strided_shards


def _same(param: _fsdp_param.FSDPParam) -> None:
    return None


def _no_strided_shards(op_strategy: Any, op_schema: Any) -> None:
    return None


def _first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """The first process's of `num_chunks`, which is all that it looks at: most of thousands would be empty."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]
