"""A process group of any size in one process: collectives answer at once, with the right shapes and no peers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from bigdit.dist import World
from bigdit.rehearse.device import FAKE_GPU
from bigdit.rehearse.request import Kernels


@contextmanager
def fake_group(world_size: int, kernels: Kernels) -> Iterator[World]:
    """The first of `world_size` processes; its peers are torch's fake backend. To be entered before fake tensors.

    Collectives allocate as NCCL's do for kernels of CUDA, and gloo's for those of the CPU.
    """
    world = World(rank=0, local_rank=0, world_size=world_size)
    # What a launcher announces, and DeepSpeed asks for.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with _real_mesh(), _as_gloo() if kernels == "cpu" else _as_nccl():
            yield world
    finally:
        dist.destroy_process_group()


@contextmanager
def _real_mesh() -> Iterator[None]:
    """A device mesh computes with its ranks and reads them: they are few, and are real."""
    original = device_mesh.init_device_mesh

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> device_mesh.DeviceMesh:
        with unset_fake_temporarily():
            return original(*args, **kwargs)

    device_mesh.init_device_mesh = build
    try:
        yield
    finally:
        device_mesh.init_device_mesh = original


# The name by which FSDP2 calls it: torch 2.13's, and that before it.
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@contextmanager
def _as_gloo() -> Iterator[None]:
    """gloo's reduce-scatter is an all-reduce of a copy of its input, which lives until that is done.

    Source: ProcessGroupGloo::_reduce_scatter_base in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp.
    """
    original = getattr(dist, _REDUCE_SCATTER)

    @functools.wraps(original)
    def copying(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = input.clone()
        work = original(output, input, *args, **kwargs)
        del copy
        return work

    setattr(dist, _REDUCE_SCATTER, copying)
    try:
        yield
    finally:
        setattr(dist, _REDUCE_SCATTER, original)


@contextmanager
def _as_nccl() -> Iterator[None]:
    """NCCL's barrier sums a number of every process's, beside the tensor by which the group finds the device.

    Source: ProcessGroup::barrier in ProcessGroup.hpp and ProcessGroupNCCL::barrier in ProcessGroupNCCL.cpp, both in
    torch/csrc/distributed/c10d.
    """
    original = dist.barrier

    @functools.wraps(original)
    def allocating(*args: Any, **kwargs: Any) -> Any:
        place = torch.empty(1, dtype=torch.uint8, device=FAKE_GPU)
        summed = torch.zeros(1, dtype=torch.float32, device=FAKE_GPU)
        work = original(*args, **kwargs)
        del place, summed
        return work

    dist.barrier = allocating
    try:
        yield
    finally:
        dist.barrier = original
