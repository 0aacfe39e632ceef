"""Weights that are never drawn: a model stands on the host as address space, until its bytes are copied to a card.

A real card computes with them, and draws less power for zeros: `fill` writes something in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from bigdit.units import MIB

T = TypeVar("T")

_LEAST_BYTES = MIB
"""Smaller weights are made and cast as they are: some of them hold values that models read."""


@contextmanager
def unwritten_weights() -> Iterator[None]:
    """In here initialisers write no large tensor, and a cast of a large host tensor makes an empty one of the other
    dtype.

    Memory that nobody wrote has no pages: a model of any size takes as much of the host as its small tensors. These are
    initialised: what lay in their memory before may be infinite.
    """
    names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    originals = {name: getattr(nn.init, name) for name in names}
    apply = nn.Module._apply
    for name, original in originals.items():
        setattr(nn.init, name, _of_small(original))
    nn.Module._apply = _casting_unwritten(apply)
    try:
        yield
    finally:
        nn.Module._apply = apply
        for name, original in originals.items():
            setattr(nn.init, name, original)


def unwritten(make: Callable[[], T]) -> Callable[[], T]:
    """`make`, where large zeros that it asks torch for on the host are memory that nobody wrote, and pinned already:
    pinning them copies nothing."""
    zeros = torch.zeros

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        if math.prod(shape) * dtype.itemsize < _LEAST_BYTES:
            return zeros(*shape, dtype=dtype)
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def made() -> T:
        torch.zeros = empty
        try:
            return make()
        finally:
            torch.zeros = zeros

    return made


def fill(module: nn.Module) -> None:
    """Write into all floating-point parameters and large buffers: ones and zeros into vectors, as norms and biases have
    them, and noise into all others."""
    # Half as wide as when they were cast, at least.
    large = ((name, buffer) for name, buffer in module.named_buffers() if 4 * buffer.nbytes >= _LEAST_BYTES)
    for name, tensor in (*module.named_parameters(), *large):
        if not tensor.is_floating_point():
            continue
        if tensor.dim() < 2:
            tensor.detach().fill_(float(name.endswith("weight")))
        else:
            fill_noise(tensor.detach(), 0.02)


def fill_noise(tensor: torch.Tensor, deviation: float) -> None:
    """Write one piece of normal noise again and again: to draw all of it would take minutes."""
    piece = (_noise() * deviation).to(tensor.dtype)
    flat = tensor.view(-1)
    whole = flat.numel() // len(piece) * len(piece)
    flat[:whole].view(-1, len(piece)).copy_(piece)
    flat[whole:].copy_(piece[: flat.numel() - whole])


@functools.cache
def _noise() -> torch.Tensor:
    return torch.randn(1 << 20)


def _of_small(initialise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def initialised(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        return tensor if tensor.nbytes >= _LEAST_BYTES else initialise(tensor, *args, **options)

    return initialised


def _casting_unwritten(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    found: dict[tuple[object, torch.dtype], torch.Tensor] = {}  # what a function makes of no elements

    def applied(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu" or tensor.nbytes < _LEAST_BYTES:
                return fn(tensor)
            if (fn, tensor.dtype) not in found:
                found[fn, tensor.dtype] = fn(tensor.new_empty(0))
            wanted = found[fn, tensor.dtype]
            return torch.empty_like(tensor, dtype=wanted.dtype) if wanted.device.type == "cpu" else fn(tensor)

        return apply(module, cast, recurse)

    return applied
