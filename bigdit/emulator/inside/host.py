"""CPU tensors of 32 MiB and more share pages: weights take no RAM, and have no values."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from . import imports
from .imports import replacing
from .known import MASK_BYTES
from .libraries import library

DRAWN_BYTES = 64 << 10
"""Larger tensors are not drawn, since the GPU would not compute with their values (known.LIMIT_BYTES). They are zero
where it keeps them (known.MASK_BYTES)."""
SHARED_BYTES = 32 << 20
"""Tensors of this size and more share pages, as in c/host.c."""


def install(torch: Any) -> None:
    """Share the CPU memory of this torch, and skip initialising, copying and computing large tensors: values would take
    minutes, and change no bytes of memory.

    Raises RuntimeError if torch's library allocates memory in an unknown way.
    """
    path = str(Path(torch.__file__).parent / "lib" / "libc10.so")
    if library("libbigdit-host").host_share(path.encode()):
        raise RuntimeError(f"{path} does not allocate CPU memory by posix_memalign, and cannot share it")
    _skip_initialising(torch)
    _skip_copying(torch)
    imports.after("diffusers.models.embeddings", install_diffusers)
    imports.after("bigdit.loader.buffers", install_loader)


def install_diffusers(embeddings: Any) -> None:
    """Do not compute tables of positions that lie on shared pages: SD3's take seconds."""
    import torch

    @replacing(embeddings, "get_2d_sincos_pos_embed")
    def of_small(table: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None or torch.get_default_device().type != "cpu":
            return table(*args, device=device, **kwargs)
        outline = table(*args, device="meta", **kwargs)
        shared = outline.numel() * outline.element_size() >= SHARED_BYTES
        return torch.empty_like(outline, device="cpu") if shared else table(*args, **kwargs)


def install_loader(buffers: Any) -> None:
    """Do not share pages of batches that are read from a store: they have checksums."""
    host = library("libbigdit-host")

    @replacing(buffers.Buffers, "take")
    def unshared(take: Any, *args: Any, **kwargs: Any) -> Any:
        host.host_own(1)
        try:
            return take(*args, **kwargs)
        finally:
            host.host_own(0)


def peak_bytes() -> int:
    """The peak of bytes of CPU tensors on shared pages."""
    host = library("libbigdit-host")
    host.host_peak_bytes.restype = ctypes.c_size_t
    return int(host.host_peak_bytes())


def tensor_bytes() -> tuple[int, int]:
    """Bytes of all CPU tensors, including pinned ones: now, and the peak since the last call."""
    host = library("libbigdit-host")
    for function in (host.host_tensor_bytes, host.host_most_tensor_bytes):
        function.restype = ctypes.c_int64
    return int(host.host_tensor_bytes()), int(host.host_most_tensor_bytes())


def _skip_initialising(torch: Any) -> None:
    init = torch.nn.init
    for name in dir(init):
        if name.endswith("_") and not name.startswith("_"):
            setattr(init, name, _of_small(getattr(init, name)))
    for name in ("normal_", "uniform_"):
        setattr(torch.Tensor, name, _of_small(getattr(torch.Tensor, name)))


def _of_small(function: Any) -> Any:
    """`function` for small tensors only. Larger CPU tensors become zero, and large ones are returned unchanged."""

    def drawn(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type != "cpu" or tensor.nbytes <= DRAWN_BYTES:
            return function(tensor, *args, **kwargs)
        if tensor.nbytes <= MASK_BYTES:
            tensor.detach().zero_()
        return tensor

    return drawn


class _Memory:
    """Questions about the memory of CPU tensors."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._host = torch, library("libbigdit-host")
        self._host.host_has.argtypes = [ctypes.c_void_p]
        for function in (self._host.host_zero, self._host.blank_known, self._host.blank_is):
            function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def has_values(self, tensor: Any) -> bool:
        """Whether it is a large CPU tensor that autograd does not follow."""
        torch = self._torch
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            return False
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        large = tensor.numel() * tensor.element_size() > DRAWN_BYTES
        return large and not (tensor.requires_grad and torch.is_grad_enabled())

    def is_lost(self, tensor: Any) -> bool:
        """Whether it lies on shared pages, and has no values."""
        return bool(self._host.host_has(tensor.data_ptr()))

    def is_blank(self, tensor: Any) -> bool:
        """Whether it is zeros that were never written."""
        return tensor.is_contiguous() and bool(self._host.blank_is(*_range(tensor)))

    def zeroed(self, tensor: Any, source: Any) -> bool:
        """Make the tensor zeros, if a copy from the source would do so; returns whether it did."""
        if not tensor.is_contiguous():
            return False
        if not self.is_lost(tensor) and not (self._host.blank_known(*_range(tensor)) and self.is_blank(source)):
            return False
        self._host.host_zero(*_range(tensor))
        return True


def _range(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _skip_copying(torch: Any) -> None:
    """Skip copies in CPU memory to shared pages, or from zeros that were never written (c/blank.c).

    The target then has zeros. The bounds of both are zeros too.
    """
    memory = _Memory(torch)
    copy, to, aminmax = torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.aminmax

    @functools.wraps(copy)
    def copied(tensor: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        values = memory.has_values(tensor) and memory.has_values(source) and source.shape == tensor.shape
        return tensor if values and memory.zeroed(tensor, source) else copy(tensor, source, *args, **kwargs)

    @functools.wraps(to)
    def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = new_dtype(tensor, *args, **kwargs) if memory.has_values(tensor) else None
        if dtype is None or (tensor.numel() * dtype.itemsize < SHARED_BYTES and not memory.is_blank(tensor)):
            return to(tensor, *args, **kwargs)
        return torch.empty_like(tensor, dtype=dtype).copy_(tensor)

    def new_dtype(tensor: Any, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        """The dtype of the new tensor that `to` makes in CPU memory; None if it makes none."""
        try:
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        except (RuntimeError, TypeError):  # torch raises it, or `copy` is positional
            return None
        dtype = dtype or tensor.dtype
        stays = (device is None or device.type == "cpu") and layout is None
        return dtype if stays and (copy or dtype != tensor.dtype) else None

    @functools.wraps(aminmax)
    def bounds(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        whole = not args and not kwargs and memory.has_values(tensor)
        if whole and (memory.is_lost(tensor) or memory.is_blank(tensor)):
            tensor = tensor.new_zeros(1)
        return aminmax(tensor, *args, **kwargs)

    torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.aminmax = copied, moved, bounds
    torch.Tensor.float = functools.wraps(torch.Tensor.float)(lambda self, **how: self.to(torch.float32, **how))
