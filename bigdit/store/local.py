"""Files of a store on this machine, open for reads at offsets, by one of two ways to their bytes.

`pread` copies them from the page cache into the batch in one system call that other threads
run beside. `mmap` maps the file: it saves a call a read, which is seen where rows are small and the file is cached,
and reads more than it was asked for where it is not; a file that is cut or a network that fails while it is mapped
kills the process (SIGBUS), where pread gives an error.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from bigdit.errors import UserError
from bigdit.files import open_descriptor
from bigdit.store.digest import bytes_of
from bigdit.store.header import Header, damaged, read_header

ReaderName = Literal["pread", "mmap"]


class File(Protocol):
    """A file that is open for reads at offsets; it closes when nothing refers to it. Threads may share it."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes from `offset` on. Raises UserError where there are fewer, or none to be had."""
        ...

    def advise(self, offset: int, nbytes: int) -> None:
        """These bytes will be read soon."""
        ...


class PreadFile:
    """Reads by system calls; the kernel is told that offsets are random, or it would read ahead in vain."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _open(path)
        weakref.finalize(self, os.close, self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read_into(self, memory: memoryview, offset: int) -> None:
        while memory:
            try:
                count = os.preadv(self._descriptor, [memory], offset)
            except OSError as error:
                raise UserError(f"data.features: {self._path} cannot be read: {error.strerror}") from None
            if not count:
                raise damaged(self._path, f"ends at byte {offset}, before its data does")
            memory, offset = memory[count:], offset + count

    def advise(self, offset: int, nbytes: int) -> None:
        if nbytes:  # none would be all that follow
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)


class MappedFile:
    """Copies from the file's pages in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = _open(path)
        try:
            self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._map.madvise(mmap.MADV_RANDOM)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def read_into(self, memory: memoryview, offset: int) -> None:
        rows = self._bytes[offset : offset + len(memory)]
        if len(rows) < len(memory):
            raise damaged(self._path, f"ends at byte {len(self._bytes)}, before its data does")
        np.copyto(np.frombuffer(memory, np.uint8), rows)  # other threads run meanwhile

    def advise(self, offset: int, nbytes: int) -> None:
        start = offset - offset % mmap.PAGESIZE
        with contextlib.suppress(ValueError):  # beyond the end of a file that was cut
            self._map.madvise(mmap.MADV_WILLNEED, start, offset + nbytes - start)


READERS: dict[str, type[PreadFile] | type[MappedFile]] = {"pread": PreadFile, "mmap": MappedFile}


class LocalParts:
    """The files of a store in a folder of this machine."""

    def __init__(self, root: Path, reader: ReaderName = "pread") -> None:
        self.root = root
        self._reader = reader

    def __str__(self) -> str:
        return str(self.root)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, whatever else lies there."""
        found = {}
        for entry in os.scandir(self.root):
            with contextlib.suppress(OSError):  # a link that leads to itself
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
        return found

    def fetch(self, names: Iterable[str]) -> None:
        """Bring files to `root`, where they are."""

    def header(self, name: str) -> Header:
        """The header of a part."""
        return read_header(self.root / name)

    def open(self, name: str) -> File:
        """A part, open for reads."""
        return READERS[self._reader](self.root / name)


def read_column(header: Header, name: str) -> torch.Tensor:
    """A whole tensor of a small file, not verified. Raises UserError where it is missing or cannot be read."""
    if name not in header.columns:
        raise damaged(header.path, f"has a damaged header: {name} is missing")
    column = header.columns[name]
    values = torch.empty(column.shape, dtype=column.dtype)
    PreadFile(header.path).read_into(bytes_of(values), column.offset)
    return values


def _open(path: Path) -> int:
    try:
        return open_descriptor(path)
    except OSError as error:
        raise UserError(f"data.features: {path} cannot be read: {error.strerror}") from None
