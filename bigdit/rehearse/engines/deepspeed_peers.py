"""DeepSpeed's loops over all processes, done once for all of them: with thousands they would take minutes.

ZeRO cuts weights and gradients into one view a process, in Python. Views take no memory; what these stand-ins
allocate is what the loops allocate, to the byte that CUDA's allocator counts. The one difference is that
ZeRO-3's paddings, of which every process may have one for each gradient, are one block together.

Source: deepspeed/runtime/zero/stage_1_and_2.py (get_data_parallel_partitions, allreduce_and_scatter),
deepspeed/runtime/zero/partition_parameters.py (AllGatherCoalescedHandle, all_gather_coalesced) and
deepspeed/runtime/comm/coalesced_collectives.py (reduce_scatter_coalesced), DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.comm.coalesced_collectives import _torch_reduce_scatter_fn
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, Init, ZeroParamStatus
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch._subclasses.fake_tensor import FakeTensor

from bigdit.memory import CUDA_GRANULARITY, rounded

MANY = 4
"""Above as many processes the loops are stood in for."""


@contextmanager
def once_for_all(world_size: int) -> Iterator[None]:
    """In here DeepSpeed's loops over processes take a time that does not grow with their number."""
    if world_size <= MANY:
        yield
        return
    stands_in = {
        (DeepSpeedZeroOptimizer, "get_data_parallel_partitions"): _partitions,
        (DeepSpeedZeroOptimizer, "allreduce_and_scatter"): _merging(DeepSpeedZeroOptimizer.allreduce_and_scatter),
        (AllGatherCoalescedHandle, "wait"): _wait,
        (Init, "_convert_to_deepspeed_param"): _sharing_views(Init._convert_to_deepspeed_param),
        (stage3, "reduce_scatter_coalesced"): _reduce_scatter,
    }
    originals = {(owner, name): getattr(owner, name) for owner, name in stands_in}
    try:
        for (owner, name), function in stands_in.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)


def _partitions(zero: DeepSpeedZeroOptimizer, flat: torch.Tensor, group_id: int) -> list[torch.Tensor]:
    """ZeRO-1 and 2: equal parts of the flat weights, of which only this process's is used."""
    world_size = comm.get_world_size(zero.real_dp_process_group[group_id])
    return [flat.narrow(0, 0, flat.numel() // world_size)] * world_size


def _merging(scatter: Callable[..., None]) -> Callable[..., None]:
    """ZeRO-1 and 2: a bucket of gradients cut where parameters and partitions end; what is of others stays whole."""

    @functools.wraps(scatter)
    def merged(
        zero: DeepSpeedZeroOptimizer, bucket: list[Any], dtype: torch.dtype, *, numel_per_bucket: int, **options: Any
    ) -> None:
        ours = comm.get_rank(options["process_group"])
        runs: list[list[Any]] = []
        numel = 0  # since the last reduction, which `scatter` makes after the part that exceeds numel_per_bucket
        mergeable = False
        for part in bucket:
            others = ours not in part[0]
            first = numel == 0  # stays alone: of one tensor no flat copy is made, and of two as much as of many
            if mergeable and others:
                runs[-1].append(part)
            else:
                runs.append([part])
            numel = numel + part[1].numel()
            mergeable = others and not first and numel <= numel_per_bucket
            numel = numel if numel <= numel_per_bucket else 0
        scatter(zero, list(map(_whole, runs)), dtype, numel_per_bucket=numel_per_bucket, **options)

    return merged


def _whole(run: list[Any]) -> Any:
    """Neighbouring parts (processes, view, output) as one."""
    ranks, first, output = run[0]
    if len(run) == 1:
        return run[0]
    return ranks, first.as_strided((sum(part.numel() for _, part, _ in run),), (1,)), output


def _wait(handle: AllGatherCoalescedHandle, handle_dependency: bool = True) -> None:
    """Copy each parameter out of what was gathered; all processes' parts of it have one source."""
    if handle.complete:
        return
    handle.allgather_handle.wait()
    for param in handle.params:
        whole = torch.empty(param.ds_numel, dtype=handle.partitions[0].dtype, device=handle.partitions[0].device)
        param.data = whole.view(param.ds_shape).to(param.ds_tensor.dtype)
        param.ds_status = ZeroParamStatus.AVAILABLE
    handle.complete = True
    if not handle_dependency:
        AllGatherCoalescedHandle.data_buffer.append(handle.partitions[:1])


def _sharing_views(convert: Callable[..., None]) -> Callable[..., None]:
    """Parameters whose gathering makes two views of its buffer: this process's part, and one for all the others'."""

    @functools.wraps(convert)
    def converted(init: Init, param: torch.Tensor) -> None:
        convert(init, param)
        param.all_gather_coalesced = _with_one_peer(param.all_gather_coalesced)

    return converted


def _with_one_peer(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        peers: dict[int, torch.Tensor] = {}

        def narrow(tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
            if start == 0:  # the first process is the one that is rehearsed
                return torch.narrow(tensor, dim, start, length)
            if id(tensor) not in peers:
                peers[id(tensor)] = torch.narrow(tensor, dim, start, length)
            return peers[id(tensor)]

        FakeTensor.narrow = narrow
        try:
            return gather(*args, **kwargs)
        finally:
            del FakeTensor.narrow

    return gathered


def _reduce_scatter(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """Each process's parts of all gradients side by side, padded to equal lengths, in one buffer; ours of it."""
    world_size = comm.get_world_size(group)
    parts = [math.ceil(tensor.numel() / world_size) for tensor in tensors]
    paddings: list[torch.Tensor] = []
    if len(tensors) == 1 and tensors[0].numel() % world_size == 0:
        buffer = tensors[0].view(-1)
    else:
        paddings = [_padding(tensor, part, world_size) for tensor, part in zip(tensors, parts, strict=True)]
        buffer = torch.empty(sum(parts) * world_size, dtype=tensors[0].dtype, device=tensors[0].device)
    buffer.div_(world_size)
    ours = buffer.narrow(0, 0, sum(parts))
    _torch_reduce_scatter_fn(buffer, ours, group=group)
    del paddings
    starts = [sum(parts[:i]) for i in range(len(parts))]
    # The first process's part of a tensor is full, if there is any.
    return [ours.narrow(0, start, min(part, t.numel())) for start, part, t in zip(starts, parts, tensors, strict=True)]


def _padding(tensor: torch.Tensor, part: int, world_size: int) -> torch.Tensor:
    """What fills the last processes' parts up, as many bytes as blocks of their own would count."""
    full, rest = divmod(tensor.numel(), part)
    blocks = (world_size - full - bool(rest)) * rounded(part * tensor.element_size(), CUDA_GRANULARITY)
    if rest:
        blocks += rounded((part - rest) * tensor.element_size(), CUDA_GRANULARITY)
    return torch.empty(blocks, dtype=torch.uint8, device=tensor.device)
