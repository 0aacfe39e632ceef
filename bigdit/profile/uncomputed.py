"""What engines compute on the host of large tensors: left out, as what kernels compute on the card is.

An optimizer on the host would really step there: minutes for billions of weights, whose values no byte follows from.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigdit.units import MIB

_LEAST_BYTES = MIB
"""Smaller tensors of the host are computed: counters, norms, flags."""

_IN_PLACE = (
    *("copy_", "add_.Tensor", "mul_.Tensor", "div_.Tensor", "lerp_.Scalar", "_fused_adamw_"),
    *("_foreach_add_.Scalar", "_foreach_mul_.Scalar", "_foreach_lerp_.Scalar", "_foreach_addcmul_.Scalar"),
    *("_foreach_div_.ScalarList", "_foreach_addcdiv_.ScalarList", "_foreach_mul_.Tensor", "_foreach_copy_"),
)
"""What engines, offloads, averages and AdamW write the host's tensors by, one by one and by lists. An optimizer that is
not among them really steps."""


@contextmanager
def large_uncomputed() -> Iterator[None]:
    """In here large tensors of the host that are set to zero read as zeros, their norms are zero, and all else leaves
    them as they are. Memory is taken as ever, on the host and on the card."""
    library = torch.library.Library("aten", "IMPL")
    makers = dict.fromkeys(_IN_PLACE, _unwritten)
    makers |= {"zero_": _zeroed, "fill_.Scalar": _zeroed, "linalg_vector_norm": _unmeasured}
    makers["_foreach_sqrt"] = _unfilled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that take another's place
        for name, maker in makers.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, maker(kernel), "CPU", with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _unwritten(kernel: Any) -> Callable[..., Any]:
    """Of one tensor, or of a list that is stepped as a whole."""

    def run(keys: Any, to: Any, *args: Any, **named: Any) -> Any:
        listed = isinstance(to, (list, tuple))
        if sum(each.nbytes for each in (to if listed else (to,))) >= _LEAST_BYTES:
            return None if listed else to
        if not listed and isinstance(args[0], (int, float)):  # it was a tensor before it came here
            args = (torch.tensor(args[0], dtype=torch.float64 if isinstance(args[0], float) else None), *args[1:])
        return kernel.call_boxed(keys, to, *args, **named)

    return run


def _unfilled(kernel: Any) -> Callable[..., Any]:
    """New tensors like those of a list, which nobody writes."""

    def run(keys: Any, of: Any) -> Any:
        if sum(each.nbytes for each in of) >= _LEAST_BYTES:
            return [torch.empty_like(each) for each in of]
        return kernel.call_boxed(keys, of)

    return run


def _zeroed(kernel: Any) -> Callable[..., Any]:
    """Pages that the system takes back read as zeros, and cost no time until they are read."""

    def run(keys: Any, tensor: torch.Tensor, *value: float) -> torch.Tensor:
        large = tensor.nbytes >= _LEAST_BYTES and tensor.is_contiguous()
        if large and not any(value) and _taken_back(tensor):
            return tensor
        zeroed: torch.Tensor = kernel.call_boxed(keys, tensor, *value)
        return zeroed

    return run


def _unmeasured(kernel: Any) -> Callable[..., Any]:
    def run(keys: Any, tensor: torch.Tensor, order: float = 2, dim: Any = None, *args: Any, **named: Any) -> Any:
        if tensor.nbytes >= _LEAST_BYTES and not dim and not any(args):
            return torch.zeros((), dtype=named.get("dtype") or tensor.dtype)
        return kernel.call_boxed(keys, tensor, order, dim, *args, **named)

    return run


def _taken_back(tensor: torch.Tensor) -> bool:
    """Whether the system took the pages that lie within the tensor; what lies at its ends is written."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        return False
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, stop - last)
    return True


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
