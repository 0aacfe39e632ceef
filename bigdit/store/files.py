"""Files of a store, for reads at offsets: on this machine, or by URL in S3, GCS, Azure or a folder.

`pread` copies from the page cache into the batch in one system call, while other threads run. `mmap` saves this call,
which matters for small rows of cached files. It reads too much of files that are not cached. If a mapped file is cut,
or its network fails, the process is killed (SIGBUS). With pread an error is raised.

Remote files are cached in a folder of limited size. Blocks that are read now or soon are fetched in parallel into
sparse copies of the parts. The least recently read copies are dropped. obstore reads credentials from the environment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from bigdit.errors import UserError
from bigdit.files import open_descriptor
from bigdit.store.header import Header, damaged, header_by, read_header
from bigdit.store.tensors import bytes_of
from bigdit.units import gib

ReaderName = Literal["pread", "mmap"]


class File(Protocol):
    """An open file for reads at offsets. It closes when nothing refers to it. Threads may share it."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes from `offset` on. Raises UserError if there are too few, or on a read error."""
        ...

    def advise(self, offset: int, nbytes: int) -> None:
        """Prefetch these bytes."""
        ...


class PreadFile:
    """Reads by system calls. It advises the kernel that offsets are random, so the kernel does not read ahead."""

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
        if nbytes:  # 0 means all bytes that follow
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)


class MappedFile:
    """Copies from the file's mapped pages."""

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
        np.copyto(np.frombuffer(memory, np.uint8), rows)  # this releases the GIL

    def advise(self, offset: int, nbytes: int) -> None:
        start = offset - offset % mmap.PAGESIZE
        with contextlib.suppress(ValueError):  # beyond the end of a cut file
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
        """Bytes of each file in the folder."""
        found = {}
        for entry in os.scandir(self.root):
            with contextlib.suppress(OSError):  # a link that leads to itself
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
        return found

    def fetch(self, names: Iterable[str]) -> None:
        """Nothing: the files are at `root`."""

    def header(self, name: str) -> Header:
        """The header of a part."""
        return read_header(self.root / name)

    def open(self, name: str) -> File:
        """An open part."""
        return READERS[self._reader](self.root / name)


def read_column(header: Header, name: str) -> torch.Tensor:
    """A whole tensor of a small file, without verification. Raises UserError if it is missing or unreadable."""
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


BLOCK = 1 << 20
"""The fewest bytes of a request. A request takes tens of milliseconds, as the transfer of a megabyte does."""

_FETCHERS = 16  # parallel requests, to hide their latency


def url_of(root: Path) -> str | None:
    """The URL that a path stands for, since Path merges its slashes; None for a path on this machine."""
    found = re.fullmatch(r"(s3|gs|az|file):(/+)(.+)", str(root))
    if found is None:
        return None
    return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[3]}"


def open_remote(root: Path, cache_bytes: int) -> RemoteParts | None:
    """The parts at a URL; None if `root` is a path on this machine. Raises UserError if it cannot be opened."""
    url = url_of(root)
    if url is None:
        return None
    try:
        from obstore.store import from_url  # an optional library
    except ImportError:
        raise UserError(f"data.features: {url} needs obstore; pip install 'bigdit[remote]'") from None
    try:
        return RemoteParts(url, from_url(url), cache_bytes)
    except Exception as error:  # obstore's errors have no common public class
        raise _unreadable(url, error) from None


class RemoteParts:
    """The files of a store at a URL, by name. `root`: the folder of fetched files."""

    def __init__(self, url: str, store: Any, cache_bytes: int) -> None:
        self.url = url
        self.store = store
        self.root = Path(tempfile.mkdtemp(prefix="bigdit-remote-"))
        weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        self._limit = cache_bytes
        self.held_bytes = 0  # of parts in the cache
        self._files: OrderedDict[str, RemoteFile] = OrderedDict()  # least recently read first
        self._lock = threading.Lock()
        self.fetchers = ThreadPoolExecutor(_FETCHERS, "fetch")
        self._sizes: dict[str, int] = {}

    def __str__(self) -> str:
        return self.url

    def sizes(self) -> dict[str, int]:
        """Bytes of each file. Raises UserError if they cannot be listed, or if two of the largest exceed the cache."""
        import obstore

        try:
            for page in obstore.list(self.store):
                # Folders hold leases of workers and other files that are no parts.
                self._sizes.update({entry["path"]: entry["size"] for entry in page if "/" not in entry["path"]})
        except Exception as error:
            raise _unreadable(self.url, error) from None
        largest = max(self._sizes.values(), default=0)
        if self._limit < 2 * largest:
            raise UserError(
                f"data.remote_cache is {gib(self._limit)}, and the largest part of {self.url} has {gib(largest)}; set "
                f"it to {gib(64 * largest)} (64 parts), at least to {gib(2 * largest)}"
            )
        return self._sizes

    def fetch(self, names: Iterable[str]) -> None:
        """Copy small files to `root`, if they exist. Raises UserError if one cannot be read."""
        import obstore

        for name in names:
            try:
                with contextlib.suppress(FileNotFoundError):
                    (self.root / name).write_bytes(obstore.get(self.store, name).bytes())
            except Exception as error:
                raise _unreadable(f"{self.url}/{name}", error) from None

    def header(self, name: str) -> Header:
        """The header of a part."""
        return header_by(Path(f"{self.url}/{name}"), lambda at, count: self.get(name, at, count), self._sizes[name])

    def open(self, name: str) -> File:
        """A part. Its blocks are fetched when they are read."""
        with self._lock:
            if name not in self._files:
                self._files[name] = RemoteFile(self, name, self._sizes[name])
            return self._files[name]

    def get(self, name: str, offset: int, nbytes: int) -> bytes:
        """Bytes of a file, fewer at its end. Raises UserError if they cannot be read."""
        import obstore

        end = min(offset + nbytes, self._sizes[name])
        try:
            return bytes(obstore.get_range(self.store, name, start=offset, end=end)) if end > offset else b""
        except Exception as error:
            raise _unreadable(f"{self.url}/{name}", error) from None

    def make_room(self, file: RemoteFile, nbytes: int) -> None:
        """Count `nbytes` more of `file`, and drop the least recently read files."""
        with self._lock:
            self._files.move_to_end(file.name)
            self.held_bytes += nbytes
            oldest = [each for each in self._files.values() if each is not file]
        for each in oldest:
            if self.held_bytes <= self._limit:
                break
            freed = each.drop()
            with self._lock:
                self.held_bytes -= freed


class RemoteFile:
    """A part: a sparse file of the blocks that were fetched."""

    def __init__(self, parts: RemoteParts, name: str, size: int) -> None:
        self.name = name
        self._parts = weakref.proxy(parts)
        self._size = size
        self._descriptor = os.open(parts.root / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        weakref.finalize(self, os.close, self._descriptor)
        self._blocks: dict[int, Future[None]] = {}  # fetched, or being fetched
        self._lock = threading.Lock()

    def advise(self, offset: int, nbytes: int) -> None:
        self._fetch(offset, nbytes)

    def read_into(self, memory: memoryview, offset: int) -> None:
        if offset + len(memory) > self._size:
            raise damaged(Path(f"{self._parts.url}/{self.name}"), f"ends at byte {self._size}, before its data does")
        while memory:
            blocks = self._fetch(offset, len(memory))
            for block in blocks.values():
                block.result()
            with self._lock:  # no block is dropped while it is copied
                if all(self._blocks.get(number) is block for number, block in blocks.items()):
                    os.preadv(self._descriptor, [memory], offset)
                    return

    def drop(self) -> int:
        """Delete all blocks; returns their bytes. Deletes none while one is being fetched."""
        with self._lock:
            if not all(block.done() for block in self._blocks.values()):
                return 0
            freed = sum(self._bytes_of(number) for number in self._blocks)
            self._blocks.clear()
            os.ftruncate(self._descriptor, 0)
            return freed

    def _bytes_of(self, block: int) -> int:
        return min(BLOCK, self._size - block * BLOCK)

    def _fetch(self, offset: int, nbytes: int) -> dict[int, Future[None]]:
        """The blocks of a range. Each run of missing blocks is one request."""
        wanted = range(offset // BLOCK, -(-(offset + nbytes) // BLOCK))
        with self._lock:
            runs: list[list[int]] = []
            for number in wanted:
                if number not in self._blocks or (self._blocks[number].done() and self._blocks[number].exception()):
                    if runs and runs[-1][-1] == number - 1:
                        runs[-1].append(number)
                    else:
                        runs.append([number])
            for run in runs:
                future = self._parts.fetchers.submit(self._download, run[0], run[-1] + 1)
                self._blocks |= dict.fromkeys(run, future)
            found = {number: self._blocks[number] for number in wanted}
        if runs:
            self._parts.make_room(self, sum(self._bytes_of(number) for run in runs for number in run))
        return found

    def _download(self, first: int, end: int) -> None:
        data = self._parts.get(self.name, first * BLOCK, (end - first) * BLOCK)
        try:
            os.pwrite(self._descriptor, data, first * BLOCK)
        except OSError as error:
            raise UserError(f"data.remote_cache: {self._parts.root} cannot be written: {error.strerror}") from None


def _unreadable(what: str, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    return UserError(f"data.features: {what} cannot be read: {' '.join(str(error).split())[:300]}")
