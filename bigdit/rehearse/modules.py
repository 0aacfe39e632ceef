"""`Module.to` on fake parameters, with the frees that it has on real ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

_SUCCESSOR = "_bigdit_successor"


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
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = _converted(param, fn)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _converted(param: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter:
    if hasattr(param, _SUCCESSOR):  # shared by two modules, and converted with the first
        successor: nn.Parameter = getattr(param, _SUCCESSOR)
        return successor
    data = fn(param)
    if data is param:
        return param
    if torch._has_compatible_shallow_copy_type(param, data):
        param.data = data
        return param
    # From the host to the fake GPU: real tensors take the new data here too, fake ones cannot.
    successor = nn.Parameter(data, requires_grad=param.requires_grad)
    setattr(param, _SUCCESSOR, successor)
    return successor
