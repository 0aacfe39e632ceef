"""Subclasses of tensors over fake data, such as the quantised parameters of bitsandbytes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

MAKE_SUBCLASS = torch.Tensor._make_subclass


def make_subclass(cls: type, data: torch.Tensor, require_grad: bool = False, **options: Any) -> torch.Tensor:
    """`torch.Tensor._make_subclass`, which refuses data of a subclass: over fake data it is of both classes."""
    if not isinstance(data, FakeTensor) or issubclass(cls, FakeTensor):
        return MAKE_SUBCLASS(cls, data, require_grad, **options)
    tensor = data.detach().requires_grad_(require_grad)
    tensor.__class__ = _fake(cls)
    return tensor


@functools.cache
def _fake(cls: type) -> type:
    return type(cls)(f"Fake{cls.__name__}", (cls, FakeTensor), {})
