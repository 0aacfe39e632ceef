"""Reads files and ranges of files. A fault of the disk stops the run, since it must not look like bad data."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import xxhash

from bigdit.errors import UserError
from bigdit.files import near, open_descriptor
from bigdit.sources.protocol import Unusable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

IMAGE_BYTES = 2**30  # images within Pillow's limit of pixels are smaller, unless made to fill memory
CAPTION_BYTES = 2**20
PIECES, PIECE_BYTES = 16, 2**16  # of a video that are digested
IMPOSSIBLE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)  # the path names no file


def read_file(path: Path, limit: int) -> bytes:
    """The bytes of a file.

    Raises FileNotFoundError; Unusable for a path that is no file, or more than `limit` bytes; UserError if it cannot be
    read.
    """
    with opened_file(path) as file:
        check_size(path.name, os.fstat(file.fileno()).st_size, limit)
        return file.read()


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Bytes [offset, offset + size) of a file. Raises UserError if it is shorter or cannot be read."""
    try:
        with opened_file(path) as file:
            file.seek(offset)
            data = file.read(size)
    except FileNotFoundError as error:
        raise unreadable(path, error) from None
    if len(data) < size:
        raise _cut(path, offset + size)
    return data


def sampled_digest(path: Path, offset: int = 0, size: int | None = None) -> int:
    """xxh3-64 of a file or a range of it. If it is larger than 1 MiB, sixteen pieces of 64 KiB are digested.

    A missing file has the digest of no bytes, since decoding reports it. Raises as `read_file`.
    """
    digest = xxhash.xxh3_64()
    with contextlib.suppress(FileNotFoundError), opened_file(path) as file:
        length = os.fstat(file.fileno()).st_size - offset if size is None else size
        last = max(length - PIECE_BYTES, 0)
        for number in range(PIECES) if length > PIECES * PIECE_BYTES else [None]:
            start, count = (0, length) if number is None else (last * number // (PIECES - 1), PIECE_BYTES)
            digest.update(os.pread(file.fileno(), count, offset + start))
        digest.update(str(length).encode())
    return digest.intdigest()


def _cut(path: Path, end: int) -> UserError:
    return UserError(f"data.images: {path} ends before byte {end}; it was longer when it was listed")


@contextlib.contextmanager
def opened_range(path: Path, offset: int, size: int) -> Iterator[BinaryIO]:
    """Bytes [offset, offset + size) of a file as a file object. Raises UserError if it cannot be read."""
    try:
        with opened_file(path) as file, io.BufferedReader(_Range(file.fileno(), offset, size)) as part:
            if os.fstat(file.fileno()).st_size < offset + size:
                raise _cut(path, offset + size)
            yield part
    except FileNotFoundError as error:
        raise unreadable(path, error) from None


class _Range(io.RawIOBase):
    """A range of an open file. Closing it leaves the file open."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        self._descriptor, self._offset, self._size, self._place = descriptor, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(start + offset, 0)
        return self._place

    def readinto(self, buffer: Buffer) -> int:
        room = memoryview(buffer).cast("B")
        count = max(min(len(room), self._size - self._place), 0)
        read = os.preadv(self._descriptor, [room[:count]], self._offset + self._place) if count else 0
        self._place += read
        return read


def check_size(name: str, size: int, limit: int) -> None:
    """Raise Unusable for more than `limit` bytes."""
    if size > limit:
        raise Unusable(f"{name} has {size} bytes; the limit is {limit}")


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a listed file that cannot be read."""
    return UserError(f"data.images: {path} cannot be read: {error.strerror or error}; run again to resume")


@contextlib.contextmanager
def opened_file(path: Path) -> Iterator[BinaryIO]:
    """A file, opened without a buffer. Raises as `read_file`."""
    try:
        with open(open_descriptor(path), "rb", buffering=0) as file:
            yield file  # type: ignore[misc]  # unbuffered: FileIO
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in IMPOSSIBLE:
            raise Unusable(f"path {path.name[:50]}: {error.strerror}") from None
        raise unreadable(path, error) from None


WINDOWS, OF_WINDOWS = re.compile(r"(^|/)[A-Za-z]:[\\/]"), "a path of Windows, whose C: is /mnt/c in WSL"


def not_there(path: Path) -> str:
    """The end of an error about a path that does not exist, with the nearest path that does."""
    text, folder = str(path), path.parent
    if WINDOWS.search(text):
        return f"does not exist: it is {OF_WINDOWS}"
    if text.startswith("~"):
        return f"does not exist: ~ stands for no folder here; write {path.expanduser()}"
    if "$" in text:
        written = os.path.expandvars(text)
        return (
            f"does not exist: $ stands for no variable here; write {'the path itself' if '$' in written else written}"
        )
    if folder.is_dir() and {*path.name} & {*"*?"}:
        return f"does not exist: patterns are for .tar files alone; name the folder {folder}"
    if (plain := Path(text.strip(" \t'\"").replace("\\", "/"))) != path and plain.exists():
        return f"does not exist; {plain} does"
    if len(path.parts) == 2 and not path.is_absolute() and not folder.exists():
        fetched = f"`hf download --repo-type dataset {path} --local-dir {path}`"
        return f"does not exist; if it is a data set of Hugging Face, run {fetched}"
    return f"does not exist{'' if path.is_absolute() else f' in {Path.cwd()}'}{near(path)}"


def empty_folder_above(path: Path) -> Path | None:
    """The nearest folder above a missing file, if it is empty: a disk may not be mounted there."""
    for folder in path.parents:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            return None if any(entries) else folder
    return None


def not_mounted(path: Path, folder: Path) -> UserError:
    """The error for a missing file that may be on a disk that is not mounted at `folder`."""
    fix = "mount its disk, or remove that folder, and run again"
    return UserError(f"data.images: {path} is missing, and {folder} is empty: {fix}")
