"""Emulated steps without values in CPU memory: weights are never initialised, and large tensors are not computed.

A model in CPU memory is only address space. An optimizer on the CPU would take minutes for billions of weights, and no
byte depends on its values. Steps on a real GPU need values, since zeros need less power: `fill` writes them.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from bigdit.units import MIB

T = TypeVar("T")

_LEAST_BYTES = MIB
"""Smaller tensors have values: counters, norms, flags, and weights that models read."""

_IN_PLACE = (
    *("copy_", "add_.Tensor", "mul_.Tensor", "div_.Tensor", "lerp_.Scalar", "_fused_adamw_"),
    *("_foreach_add_.Scalar", "_foreach_mul_.Scalar", "_foreach_lerp_.Scalar", "_foreach_addcmul_.Scalar"),
    *("_foreach_div_.ScalarList", "_foreach_addcdiv_.ScalarList", "_foreach_mul_.Tensor", "_foreach_copy_"),
)
"""The operators with which engines, offload, EMA and AdamW write CPU tensors and lists of them. Other operators are
computed."""


@contextmanager
def unwritten_weights() -> Iterator[None]:
    """Within, initialisers write no large tensor, and casts of large CPU tensors return empty ones.

    Unwritten memory has no pages, so a model of any size needs only the memory of its small tensors. Small tensors are
    initialised: arbitrary values may be infinite.
    """
    originals = {name: each for name, each in vars(nn.init).items() if name.endswith("_") and name[0] != "_"}
    apply = nn.Module._apply
    for name, original in originals.items():
        setattr(nn.init, name, functools.update_wrapper(functools.partial(_of_small, original), original))
    nn.Module._apply = _casting_unwritten(apply)
    try:
        yield
    finally:
        nn.Module._apply = apply
        for name, original in originals.items():
            setattr(nn.init, name, original)


def unwritten(make: Callable[[], T]) -> Callable[[], T]:
    """`make` with large CPU zeros as unwritten memory. It is pinned from the start, so that pinning copies nothing."""
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
    """Write all floating-point parameters and large buffers: ones or zeros into vectors, noise into the others."""
    # A cast may have made them up to four times smaller.
    large = ((name, buffer) for name, buffer in module.named_buffers() if 4 * buffer.nbytes >= _LEAST_BYTES)
    for name, tensor in (*module.named_parameters(), *large):
        if not tensor.is_floating_point():
            continue
        if tensor.dim() < 2:
            tensor.detach().fill_(float(name.endswith("weight")))
        else:
            fill_noise(tensor.detach(), 0.02)


def fill_noise(tensor: torch.Tensor, deviation: float) -> None:
    """Repeat one piece of normal noise: to generate all of it would take minutes."""
    piece = (_noise() * deviation).to(tensor.dtype)
    flat = tensor.view(-1)
    whole = flat.numel() // len(piece) * len(piece)
    flat[:whole].view(-1, len(piece)).copy_(piece)
    flat[whole:].copy_(piece[: flat.numel() - whole])


@functools.cache
def _noise() -> torch.Tensor:
    return torch.randn(1 << 20)


def _of_small(
    initialise: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: object, **options: object
) -> torch.Tensor:
    return tensor if tensor.nbytes >= _LEAST_BYTES else initialise(tensor, *args, **options)


def _casting_unwritten(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    found: dict[tuple[object, torch.dtype], torch.Tensor] = {}  # results for empty tensors

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


@contextmanager
def large_uncomputed() -> Iterator[None]:
    """Within, large CPU tensors that are set to zero read as zeros, and their norms are zero. No other operator writes
    them. Allocations are the same, in CPU memory and on the GPU."""
    library = torch.library.Library("aten", "IMPL")
    runs: dict[str, Callable[..., Any]] = dict.fromkeys(_IN_PLACE, _skip_write)
    runs |= {"zero_": _zero, "fill_.Scalar": _zero, "linalg_vector_norm": _skip_norm, "_foreach_sqrt": _skip_sqrt}
    runs |= {"cat": _skip_cat}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that take another's place
        for name, run in runs.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, functools.partial(run, kernel), "CPU", with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _skip_write(kernel: Any, keys: Any, to: Any, *args: Any, **named: Any) -> Any:
    """Do not write a large tensor, or a list of tensors that is large in total."""
    listed = isinstance(to, (list, tuple))
    if sum(each.nbytes for each in (to if listed else (to,))) >= _LEAST_BYTES:
        return None if listed else to
    if not listed and isinstance(args[0], (int, float)):  # it was a tensor before it came here
        args = (torch.tensor(args[0], dtype=torch.float64 if isinstance(args[0], float) else None), *args[1:])
    return kernel.call_boxed(keys, to, *args, **named)


def _skip_sqrt(kernel: Any, keys: Any, of: Any) -> Any:
    """Unwritten tensors like those of a list."""
    if sum(each.nbytes for each in of) >= _LEAST_BYTES:
        return [torch.empty_like(each) for each in of]
    return kernel.call_boxed(keys, of)


def _skip_cat(kernel: Any, keys: Any, parts: Any, dim: int = 0) -> Any:
    """An unwritten tensor as large as all parts, if these are vectors, as DeepSpeed's offload joins all weights."""
    size = sum(map(torch.numel, parts))
    if size * parts[0].itemsize < _LEAST_BYTES or any(
        each.dim() != 1 or each.dtype != parts[0].dtype for each in parts
    ):
        return kernel.call_boxed(keys, parts, dim)
    return parts[0].new_empty(size)


def _zero(kernel: Any, keys: Any, tensor: torch.Tensor, *value: float) -> Any:
    """Free the pages: they read as zeros, and cost no time until they are read."""
    large = tensor.nbytes >= _LEAST_BYTES and tensor.is_contiguous()
    if large and not any(value) and _free_pages(tensor):
        return tensor
    return kernel.call_boxed(keys, tensor, *value)


def _skip_norm(
    kernel: Any, keys: Any, tensor: torch.Tensor, order: float = 2, dim: Any = None, *args: Any, **named: Any
) -> Any:
    if tensor.nbytes >= _LEAST_BYTES and not dim and not any(args):
        return torch.zeros((), dtype=named.get("dtype") or tensor.dtype)
    return kernel.call_boxed(keys, tensor, order, dim, *args, **named)


def _free_pages(tensor: torch.Tensor) -> bool:
    """Free the tensor's whole pages, and write zeros to its ends. False if the system refuses."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        return False
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, stop - last)
    return True
