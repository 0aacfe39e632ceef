"""Host tensors of 32 MiB and more, on pages that they share: weights take no RAM, and hold nothing."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from .libraries import library

DRAWN_BYTES = 64 << 10
"""Larger tensors are not initialised: the card would not take their values (known.LIMIT_BYTES)."""


def install(torch: Any) -> None:
    """Share the host memory of this torch, and leave large tensors undrawn: values take minutes, and no byte of memory.

    Raises RuntimeError where torch's library takes its memory otherwise than was known.
    """
    path = str(Path(torch.__file__).parent / "lib" / "libc10.so")
    if library("libbigdit-host").host_share(path.encode()):
        raise RuntimeError(f"{path} does not take host memory by posix_memalign, and cannot be made to share it")
    _leave_undrawn(torch)


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
