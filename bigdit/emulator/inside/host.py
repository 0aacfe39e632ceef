"""Host tensors of 32 MiB and more, on pages that they share: weights take no RAM, and hold nothing."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from . import imports
from .libraries import library

DRAWN_BYTES = 64 << 10
"""Larger tensors are not initialised: the card would not take their values (known.LIMIT_BYTES)."""
SHARED_BYTES = 32 << 20
"""From here on tensors share pages; as in c/host.c."""


def install(torch: Any) -> None:
    """Share the host memory of this torch, and leave large tensors undrawn, uncopied and uncomputed: values take
    minutes, and no byte of memory.

    Raises RuntimeError where torch's library takes its memory otherwise than was known.
    """
    path = str(Path(torch.__file__).parent / "lib" / "libc10.so")
    if library("libbigdit-host").host_share(path.encode()):
        raise RuntimeError(f"{path} does not take host memory by posix_memalign, and cannot be made to share it")
    _leave_undrawn(torch)
    _leave_uncopied(torch)
    imports.after("diffusers.models.embeddings", install_diffusers)
    imports.after("bigdit.loader.buffers", install_loader)


def install_diffusers(embeddings: Any) -> None:
    """Leave tables of positions that would lie on shared pages uncomputed: seconds of sines, for SD3's."""
    import torch

    table = embeddings.get_2d_sincos_pos_embed

    @functools.wraps(table)
    def of_small(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None or torch.get_default_device().type != "cpu":
            return table(*args, device=device, **kwargs)
        outline = table(*args, device="meta", **kwargs)
        shared = outline.numel() * outline.element_size() >= SHARED_BYTES
        return torch.empty_like(outline, device="cpu") if shared else table(*args, **kwargs)

    embeddings.get_2d_sincos_pos_embed = of_small


def install_loader(buffers: Any) -> None:
    """Leave batches that are read from a store pages of their own: each sample's checksum is held against them."""
    take, host = buffers.Buffers.take, library("libbigdit-host")

    @functools.wraps(take)
    def apart(*args: Any, **kwargs: Any) -> Any:
        host.host_own(1)
        try:
            return take(*args, **kwargs)
        finally:
            host.host_own(0)

    buffers.Buffers.take = apart


def peak_bytes() -> int:
    """The most bytes of host tensors that shared pages at a time."""
    host = library("libbigdit-host")
    host.host_peak_bytes.restype = ctypes.c_size_t
    return int(host.host_peak_bytes())


def tensor_bytes() -> tuple[int, int]:
    """Bytes of all host tensors, page-locked ones among them: now, and the most since this was asked last."""
    host = library("libbigdit-host")
    for function in (host.host_tensor_bytes, host.host_most_tensor_bytes):
        function.restype = ctypes.c_int64
    return int(host.host_tensor_bytes()), int(host.host_most_tensor_bytes())


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


class _Memory:
    """What is known of the memory of host tensors."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._host = torch, library("libbigdit-host")
        self._host.host_has.argtypes = [ctypes.c_void_p]
        for function in (self._host.host_zero, self._host.blank_known, self._host.blank_is):
            function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def has_values(self, tensor: Any) -> bool:
        """Whether it is a tensor of the host with many values, and none that autograd follows."""
        torch = self._torch
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            return False
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        large = tensor.numel() * tensor.element_size() > DRAWN_BYTES
        return large and not (tensor.requires_grad and torch.is_grad_enabled())

    def is_lost(self, tensor: Any) -> bool:
        """Whether it lies on shared pages, and holds nothing."""
        return bool(self._host.host_has(tensor.data_ptr()))

    def is_blank(self, tensor: Any) -> bool:
        """Whether it reads as zeros, which nobody wrote."""
        return tensor.is_contiguous() and bool(self._host.blank_is(*_range(tensor)))

    def zeroed(self, tensor: Any, source: Any) -> bool:
        """Whether it has been made the zeros that a copy from the source would leave in it."""
        if not tensor.is_contiguous():
            return False
        if not self.is_lost(tensor) and not (self._host.blank_known(*_range(tensor)) and self.is_blank(source)):
            return False
        self._host.host_zero(*_range(tensor))
        return True


def _range(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _leave_uncopied(torch: Any) -> None:
    """Have copies on the host leave zeros where what they would write is lost, on shared pages, or is zeros itself, of
    memory that nobody wrote (c/blank.c); and have the bounds of both be zeros."""
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
        """That of a new tensor, which `to` makes on the host; None where it makes none."""
        try:
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        except (RuntimeError, TypeError):  # torch's to say, or a copy that was asked for by its position
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
