"""Offload of activations: what autograd saves of the blocks waits on the host for the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from bigdit.models.family import Family

Packed: TypeAlias = "torch.Tensor | tuple[torch.device, torch.Tensor, tuple[torch.Size, tuple[int, ...]] | None]"


def offload_activations(model: nn.Module, family: Family) -> None:
    """Copy to the host what autograd saves in each block, and back when its backward pass asks for it.

    To be applied after checkpointing: a checkpointed block saves its inputs, and those are what moves; what a
    selective one keeps stays. Weights stay too. A tensor that several operations save is copied for each of
    them; of an expanded one the memory behind it is. Host memory is pinned where the device is a GPU. On a CPU it is a
    copy within the host, and saves nothing.
    """
    for block in family.blocks(model):
        # Known now, before an engine takes the parameters apart.
        sizes = {parameter.numel() for parameter in block.parameters()}
        to_host = functools.partial(_to_host, block, sizes)
        block.forward = functools.partial(_offloaded, to_host, block.forward)


def _offloaded(to_host: Callable[..., Packed], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(to_host, _to_device):
        return forward(*args, **kwargs)


def _to_host(block: nn.Module, sizes: set[int], tensor: torch.Tensor) -> Packed:
    # As torch.autograd.graph.save_on_cpu, which moves weights too, and forgets the strides.
    if tensor.numel() in sizes and _is_weight(block, tensor):
        return tensor
    expanded = None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if 0 < span < tensor.numel():  # a mask for all queries and heads: attention asks for its strides, too
        expanded = tensor.shape, tensor.stride()
        tensor = tensor.as_strided((span,), (1,))
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    host.copy_(tensor, non_blocking=True)
    return tensor.device, host, expanded


def _to_device(packed: Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host, expanded = packed
    tensor = host.to(device, non_blocking=True)
    return tensor if expanded is None else tensor.as_strided(*expanded)


def _is_weight(block: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or a view of one, by its storage: engines gather parameters, and free them."""
    storage = tensor.untyped_storage()._cdata
    return any(parameter.untyped_storage()._cdata == storage for parameter in block.parameters())
