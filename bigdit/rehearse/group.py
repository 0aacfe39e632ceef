"""A process group of any size in one process: collectives answer at once, with the right shapes and no peers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from bigdit.dist import World


@contextmanager
def fake_group(world_size: int) -> Iterator[World]:
    """The first of `world_size` processes; its peers are torch's fake backend. To be entered before fake tensors."""
    world = World(rank=0, local_rank=0, world_size=world_size)
    # What a launcher announces, and DeepSpeed asks for.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with _real_mesh():
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
