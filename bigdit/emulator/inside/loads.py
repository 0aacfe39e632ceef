"""What scripts load of holes in files takes no RAM: neither a page of the system's cache nor a fault for each, until it
is written to. So are fake weights, and what was saved on an emulated card (`saves`).

Covered is what maps files by torch: safetensors, and torch.load with `mmap=True`.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

from . import libraries

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's, which older Pythons have no name for
_AT_ONCE = 1 << 30  # bytes that are read; Linux reads no more than 2 GiB


def install(torch: Any) -> None:
    """Have torch map files that are mostly holes as zeros, with what they hold copied into them."""
    storage = torch.UntypedStorage
    storage.from_file = staticmethod(_from_file(torch, storage.from_file))


def _from_file(torch: Any, from_file: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(from_file)
    def mapped(filename: Any, shared: bool = False, nbytes: int = 0, **named: Any) -> Any:
        size = nbytes or named.get("size", 0)
        there = size and not shared and os.path.isfile(filename)  # of what is not, torch says so itself
        memory = _zeros_with_data(filename, size) if there else None
        if memory is None:
            return from_file(filename, shared, size)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    return mapped


def _zeros_with_data(path: str | os.PathLike[str], size: int) -> _Zeros | None:
    """Zeros with the file's data in them; None where the file is not mostly holes, or shorter than that."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < size:
            return None
        ranges = list(_data(file.fileno(), size))
        if 2 * sum(end - begin for begin, end in ranges) > size:
            return None
        memory = _Zeros(size)
        for begin, end in ranges:
            memory[begin:end] = os.pread(file.fileno(), end - begin, begin)
    return memory


class _Zeros(mmap.mmap):
    """A private map of zeros, whose pages take no RAM as long as they are read alone; the libraries are told of it,
    and know what of it nobody wrote (c/blank.c)."""

    _address: ctypes.c_void_p
    _forget: Any

    def __new__(cls, size: int) -> _Zeros:
        made = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            made.madvise(mmap.MADV_HUGEPAGE)
        made._forget = None
        if libraries.loaded:
            host, address = libraries.library("libbigdit-host"), ctypes.addressof(ctypes.c_char.from_buffer(made))
            host.blank_remember(ctypes.c_void_p(address), ctypes.c_size_t(size))
            made._forget, made._address = host.blank_forget, ctypes.c_void_p(address)
        return made

    def __del__(self) -> None:
        if self._forget is not None:  # before the system may give the addresses to others
            self._forget(self._address)


def _data(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the file holds data. Source: lseek(2); ENXIO says that there is none behind."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError:
            return
        if begin >= size:
            return
        end = min(os.lseek(file, begin, os.SEEK_HOLE), size, begin + _AT_ONCE)
        yield begin, end
