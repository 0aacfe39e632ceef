"""Files of a store: on this machine, open for reads at offsets, or in S3, GCS, Azure or another folder by URL.

`pread` copies them from the page cache into the batch in one system call that other threads run beside. `mmap` maps the
file: it saves a call a read, which is seen where rows are small and the file is cached, and reads more than it was
asked for where it is not; a file that is cut or a network that fails while it is mapped kills the process (SIGBUS),
where pread gives an error.

Of what is afar, ranges are kept in a bounded folder of this machine: blocks that are read, or will be soon, are fetched
side by side into sparse copies of the parts; the copies that were not read for the longest are let go of when they are
too many. Credentials are the environment's, as obstore reads it.
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


BLOCK = 1 << 20
"""Bytes that are fetched at once at least: a request costs tens of milliseconds, as long as a megabyte or more does."""

_FETCHERS = 16  # requests side by side: what hides their latency


def url_of(root: Path) -> str | None:
    """The URL that a path was written as, since a Path folds its slashes; None of a path on this machine."""
    found = re.fullmatch(r"(s3|gs|az|file):(/+)(.+)", str(root))
    if found is None:
        return None
    return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[3]}"


def open_remote(root: Path, cache_bytes: int) -> RemoteParts | None:
    """The parts at a URL; None where `root` is a path on this machine. Raises UserError where it cannot be opened."""
    url = url_of(root)
    if url is None:
        return None
    try:
        from obstore.store import from_url  # an optional library
    except ImportError:
        raise UserError(f"data.features: {url} needs obstore; `pip install 'bigdit[remote]'` brings it") from None
    try:
        return RemoteParts(url, from_url(url), cache_bytes)
    except Exception as error:  # obstore's errors have no common public class
        raise _unreadable(url, error) from None


class RemoteParts:
    """Files of a store in an object store of obstore, by name; `root`: where small ones are once they are fetched."""

    def __init__(self, url: str, store: Any, cache_bytes: int) -> None:
        self.url = url
        self.store = store
        self.root = Path(tempfile.mkdtemp(prefix="bigdit-remote-"))
        weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        self._limit = cache_bytes
        self._held = 0
        self._files: OrderedDict[str, RemoteFile] = OrderedDict()  # least recently read first
        self._lock = threading.Lock()
        self.fetchers = ThreadPoolExecutor(_FETCHERS, "fetch")
        self._sizes: dict[str, int] = {}

    def __str__(self) -> str:
        return self.url

    def sizes(self) -> dict[str, int]:
        """Bytes of each file. Raises UserError where they cannot be listed, or one does not fit into the cache."""
        import obstore

        try:
            for page in obstore.list(self.store):
                # In folders of it lie what workers have in hand, and other things that are none of the store's files.
                self._sizes.update({entry["path"]: entry["size"] for entry in page if "/" not in entry["path"]})
        except Exception as error:
            raise _unreadable(self.url, error) from None
        largest = max(self._sizes.values(), default=0)
        if self._limit < 2 * largest:
            raise UserError(
                f"data.remote_cache is {gib(self._limit)}, and the largest part of {self.url} has {gib(largest)}; set "
                f"it to {gib(64 * largest)}, a window of the order, and not below {gib(2 * largest)}"
            )
        return self._sizes

    def fetch(self, names: Iterable[str]) -> None:
        """Bring small files to `root`, those that there are. Raises UserError where one cannot be read."""
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
        """A part, of which nothing is fetched yet, or what is in the cache of it."""
        with self._lock:
            if name not in self._files:
                self._files[name] = RemoteFile(self, name, self._sizes[name])
            return self._files[name]

    def get(self, name: str, offset: int, nbytes: int) -> bytes:
        """Bytes of a file, fewer at its end. Raises UserError where they cannot be had."""
        import obstore

        end = min(offset + nbytes, self._sizes[name])
        try:
            return bytes(obstore.get_range(self.store, name, start=offset, end=end)) if end > offset else b""
        except Exception as error:
            raise _unreadable(f"{self.url}/{name}", error) from None

    def make_room(self, file: RemoteFile, nbytes: int) -> None:
        """Count `nbytes` more of `file` as held, and let go of the files that were not read for the longest."""
        with self._lock:
            self._files.move_to_end(file.name)
            self._held += nbytes
            oldest = [each for each in self._files.values() if each is not file]
        for each in oldest:
            if self._held <= self._limit:
                break
            freed = each.let_go()
            with self._lock:
                self._held -= freed

    @property
    def held_bytes(self) -> int:
        """Of parts, in the cache now."""
        return self._held


class RemoteFile:
    """A part as far as it was fetched: a sparse file of blocks."""

    def __init__(self, parts: RemoteParts, name: str, size: int) -> None:
        self.name = name
        self._parts = weakref.proxy(parts)
        self._size = size
        self._descriptor = os.open(parts.root / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        weakref.finalize(self, os.close, self._descriptor)
        self._blocks: dict[int, Future[None]] = {}  # fetched, or on the way
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
            with self._lock:  # nobody lets go of the blocks while they are copied
                if all(self._blocks.get(number) is block for number, block in blocks.items()):
                    os.preadv(self._descriptor, [memory], offset)
                    return

    def let_go(self) -> int:
        """Free the disk of all blocks that are here; how many bytes. None while any is on its way."""
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
        """The blocks of a range, those that were missing on their way, one request for each run of them."""
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
                fetched = self._parts.fetchers.submit(self._bring, run[0], run[-1] + 1)
                self._blocks |= dict.fromkeys(run, fetched)
            found = {number: self._blocks[number] for number in wanted}
        if runs:
            self._parts.make_room(self, sum(self._bytes_of(number) for run in runs for number in run))
        return found

    def _bring(self, first: int, end: int) -> None:
        data = self._parts.get(self.name, first * BLOCK, (end - first) * BLOCK)
        try:
            os.pwrite(self._descriptor, data, first * BLOCK)
        except OSError as error:
            raise UserError(f"data.remote_cache: {self._parts.root} cannot be written: {error.strerror}") from None


def _unreadable(what: str, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    return UserError(f"data.features: {what} cannot be read: {' '.join(str(error).split())[:300]}")
