"""What FSDP2 asks of real tensors and of its peers, answered where neither are there."""

from __future__ import annotations

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from bigdit.rehearse.engines import streams


def do_without_data() -> None:
    """Let FSDP2 start on fake tensors, as the first of any number of processes. To be called before it is."""
    # At its first step it compares addresses, to learn whether the shards that it padded and pinned are still the
    # model's parameters, and makes them anew where they are not. Nothing replaces them in a rehearsal.
    _fsdp_param.FSDPParam.reset_sharded_param = _same
    _fsdp_param._chunk_with_empty = _first_chunk
    # Of a unit that was gathered for gradients and had none, as beside adapters, it asks the accelerator itself.
    torch.accelerator.current_stream = _current_stream


def _same(param: _fsdp_param.FSDPParam) -> None:
    return None


def _current_stream(device: object = None) -> streams.Stream:
    return streams.current()


def _first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """The first process's of `num_chunks`, which is all that it looks at: most of thousands would be empty."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]
