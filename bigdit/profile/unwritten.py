"""What emulated steps leave out on the host: weights are never drawn, and large tensors are not computed.

A model stands on the host as address space, until its bytes are copied to a GPU. An optimizer on the host would really
step there: minutes for billions of weights, whose values no byte follows from. A real GPU computes with the weights,
and draws less power for zeros: `fill` writes something in.
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
"""Smaller tensors are made, cast and computed: counters, norms, flags, and weights whose values models read."""

_IN_PLACE = (
    *("copy_", "add_.Tensor", "mul_.Tensor", "div_.Tensor", "lerp_.Scalar", "_fused_adamw_"),
    *("_foreach_add_.Scalar", "_foreach_mul_.Scalar", "_foreach_lerp_.Scalar", "_foreach_addcmul_.Scalar"),
    *("_foreach_div_.ScalarList", "_foreach_addcdiv_.ScalarList", "_foreach_mul_.Tensor", "_foreach_copy_"),
)
"""What engines, offloads, averages and AdamW write the host's tensors by, one by one and by lists. An optimizer that is
not among them really steps."""


@contextmanager
def unwritten_weights() -> Iterator[None]:
    """In here initialisers write no large tensor, and a cast of a large host tensor makes an empty one of the other
    dtype.

    Memory that nobody wrote has no pages: a model of any size takes as much of the host as its small tensors. These are
    initialised: what lay in their memory before may be infinite.
    """
    originals = {name: each for name, each in vars(nn.init).items() if name.endswith("_") and name[0] != "_"}
    apply = nn.Module._apply
    for name, original in originals.items():
        setattr(nn.init, name, functools.partial(_of_small, original))
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


def _of_small(
    initialise: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: object, **options: object
) -> torch.Tensor:
    return tensor if tensor.nbytes >= _LEAST_BYTES else initialise(tensor, *args, **options)


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


@contextmanager
def large_uncomputed() -> Iterator[None]:
    """In here large tensors of the host that are set to zero read as zeros, their norms are zero, and all else leaves
    them as they are. Memory is taken as ever, on the host and on the GPU."""
    library = torch.library.Library("aten", "IMPL")
    runs: dict[str, Callable[..., Any]] = dict.fromkeys(_IN_PLACE, _unwritten)
    runs |= {"zero_": _zeroed, "fill_.Scalar": _zeroed, "linalg_vector_norm": _unmeasured, "_foreach_sqrt": _unfilled}
    runs |= {"cat": _unjoined}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that take another's place
        for name, run in runs.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, functools.partial(run, kernel), "CPU", with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _unwritten(kernel: Any, keys: Any, to: Any, *args: Any, **named: Any) -> Any:
    """Of one tensor, or of a list that is stepped as a whole."""
    listed = isinstance(to, (list, tuple))
    if sum(each.nbytes for each in (to if listed else (to,))) >= _LEAST_BYTES:
        return None if listed else to
    if not listed and isinstance(args[0], (int, float)):  # it was a tensor before it came here
        args = (torch.tensor(args[0], dtype=torch.float64 if isinstance(args[0], float) else None), *args[1:])
    return kernel.call_boxed(keys, to, *args, **named)


def _unfilled(kernel: Any, keys: Any, of: Any) -> Any:
    """New tensors like those of a list, which nobody writes."""
    if sum(each.nbytes for each in of) >= _LEAST_BYTES:
        return [torch.empty_like(each) for each in of]
    return kernel.call_boxed(keys, of)


def _unjoined(kernel: Any, keys: Any, parts: Any, dim: int = 0) -> Any:
    """A new tensor as large as the vectors, which DeepSpeed's offload joins: all weights of a model."""
    size = sum(map(torch.numel, parts))
    if size * parts[0].itemsize < _LEAST_BYTES or any(
        each.dim() != 1 or each.dtype != parts[0].dtype for each in parts
    ):
        return kernel.call_boxed(keys, parts, dim)
    return parts[0].new_empty(size)


def _zeroed(kernel: Any, keys: Any, tensor: torch.Tensor, *value: float) -> Any:
    """Pages that the system takes back read as zeros, and cost no time until they are read."""
    large = tensor.nbytes >= _LEAST_BYTES and tensor.is_contiguous()
    if large and not any(value) and _taken_back(tensor):
        return tensor
    return kernel.call_boxed(keys, tensor, *value)


def _unmeasured(
    kernel: Any, keys: Any, tensor: torch.Tensor, order: float = 2, dim: Any = None, *args: Any, **named: Any
) -> Any:
    if tensor.nbytes >= _LEAST_BYTES and not dim and not any(args):
        return torch.zeros((), dtype=named.get("dtype") or tensor.dtype)
    return kernel.call_boxed(keys, tensor, order, dim, *args, **named)


def _taken_back(tensor: torch.Tensor) -> bool:
    """Whether the system took the pages that lie within the tensor; what lies at its ends is written."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        return False
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, stop - last)
    return True
