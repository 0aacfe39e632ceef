"""`Module.to` and `tensor.data = …` on fake tensors, with the frees that they have on real ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

_DATA = torch.Tensor.data


def convert_in_place(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """What `Module._apply` does with real parameters: give each one new data, which frees the old at once.

    For fake ones torch swaps two tensor objects instead; that refuses tensors with weak references, which
    FakeTensorMode itself makes, and keeps each old parameter until the next one is converted. Gradients are
    not converted: an engine moves a model before its first step.
    """
    if recurse:
        for child in module.children():
            child._apply(fn)
    with torch.no_grad():
        for param in module._parameters.values():
            if param is not None:
                data = fn(param)
                if data is not param:
                    param.data = data
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return _DATA.__get__(tensor)


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """A fake tensor takes data of its own device only; from the host to the GPU it takes over the whole tensor."""
    if torch._has_compatible_shallow_copy_type(tensor, data):
        _DATA.__set__(tensor, data)
        return
    successor = data.detach().requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, successor)
    tensor.fake_device, successor.fake_device = successor.fake_device, tensor.fake_device


assignable_data = property(_data, _set_data)
"""For `FakeTensor.data`: can be set to data on another device, as that of real tensors can."""
