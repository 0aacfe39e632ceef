"""Host tensors of 32 MiB and more, on pages that they share: weights take no RAM, and hold nothing."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from .libraries import library

DRAWN_BYTES = 64 << 10
"""Larger tensors are not initialised: the card would not take their values (known.LIMIT_BYTES)."""
SHARED_BYTES = 32 << 20
"""From here on tensors share pages; as in c/host.c."""


def install(torch: Any) -> None:
    """Share the host memory of this torch, and leave large tensors undrawn and uncopied: values take minutes, and no
    byte of memory.

    Raises RuntimeError where torch's library takes its memory otherwise than was known.
    """
    path = str(Path(torch.__file__).parent / "lib" / "libc10.so")
    if library("libbigdit-host").host_share(path.encode()):
        raise RuntimeError(f"{path} does not take host memory by posix_memalign, and cannot be made to share it")
    _leave_undrawn(torch)
    _leave_uncopied(torch)


def peak_bytes() -> int:
    """The most bytes of host tensors that shared pages at a time."""
    host = library("libbigdit-host")
    host.host_peak_bytes.restype = ctypes.c_size_t
    return int(host.host_peak_bytes())


def _leave_undrawn(torch: Any) -> None:
    init = torch.nn.init
    for name in dir(init):
        if name.endswith("_") and not name.startswith("_"):
            setattr(init, name, _of_small(getattr(init, name)))
    for name in ("normal_", "uniform_"):
        setattr(torch.Tensor, name, _of_small(getattr(torch.Tensor, name)))


def _of_small(function: Any) -> Any:
    """`function`, which hands large tensors of the host back as they are."""

    def drawn(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() > DRAWN_BYTES:
            return tensor
        return function(tensor, *args, **kwargs)

    return drawn


def _leave_uncopied(torch: Any) -> None:
    """Have copies from the host to shared pages write zeros there: what they would write is lost."""
    host, plain = library("libbigdit-host"), (torch.Tensor, torch.nn.Parameter)
    host.host_has.argtypes = [ctypes.c_void_p]
    host.host_zero.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    copy, to = torch.Tensor.copy_, torch.Tensor.to

    def is_values(tensor: Any) -> bool:
        """Whether it is a tensor of the host with many values, and none that autograd follows."""
        if type(tensor) not in plain or tensor.device.type != "cpu":
            return False
        large = tensor.numel() * tensor.element_size() > DRAWN_BYTES
        return large and not (tensor.requires_grad and torch.is_grad_enabled())

    def zeroed(tensor: Any) -> bool:
        """Whether the tensor lies on shared pages, which are zeros then."""
        if not tensor.is_contiguous() or not host.host_has(tensor.data_ptr()):
            return False
        host.host_zero(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return True

    @functools.wraps(copy)
    def copied(tensor: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        lost = is_values(tensor) and is_values(source) and source.shape == tensor.shape and zeroed(tensor)
        return tensor if lost else copy(tensor, source, *args, **kwargs)

    @functools.wraps(to)
    def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = new_dtype(tensor, *args, **kwargs) if is_values(tensor) else None
        if dtype is None or tensor.numel() * dtype.itemsize < SHARED_BYTES:
            return to(tensor, *args, **kwargs)
        return torch.empty_like(tensor, dtype=dtype).copy_(tensor)

    def new_dtype(tensor: Any, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        """That of a new tensor, which `to` makes on the host; None where it makes none."""
        try:
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        except (RuntimeError, TypeError):  # torch's to say, or a copy that was asked for by its position
            return None
        dtype = dtype or tensor.dtype
        stays = (device is None or device.type == "cpu") and layout is None
        return dtype if stays and (copy or dtype != tensor.dtype) else None

    torch.Tensor.copy_, torch.Tensor.to = copied, moved
