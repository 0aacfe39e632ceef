"""Bytes of files and of ranges of them; what is the disk's fault stops the run, and is never taken for bad data."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bigdit.errors import UserError
from bigdit.sources.protocol import Unusable

PICTURE_BYTES = 2**30  # a picture within Pillow's limit of pixels takes less, unless it was made to fill the memory
CAPTION_BYTES = 2**20
IMPOSSIBLE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # of paths that name no file


def read_file(path: Path, limit: int) -> bytes:
    """All of a file. Raises FileNotFoundError; Unusable for what is no file or larger than `limit` bytes;
    UserError where it cannot be read."""
    with opened_file(path) as file:
        check_size(path.name, os.fstat(file.fileno()).st_size, limit)
        return file.read()


@contextlib.contextmanager
def opened_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be read piece by piece. Raises as `read_file`."""
    with _opened(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Unusable(f"{path.name} is not a file")
        yield file


def leads_out(root: Path, path: Path) -> bool:
    """Whether a path is a link to what is not below `root`."""
    return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Bytes [offset, offset + size) of a file. Raises UserError where it ends before them or cannot be read."""
    try:
        with _opened(path) as file:
            file.seek(offset)
            data = file.read(size)
    except FileNotFoundError as error:
        raise unreadable(path, error) from None
    if len(data) < size:
        raise UserError(f"data.images: {path} ends before byte {offset + size}, and did not when it was listed")
    return data


def check_size(name: str, size: int, limit: int) -> None:
    """Raise Unusable for more than `limit` bytes."""
    if size > limit:
        raise Unusable(f"{name} has {size} bytes; {limit} are the most that is read")


def unreadable(path: Path, error: OSError) -> UserError:
    """The error of a file that was there, or should be."""
    return UserError(f"data.images: {path} cannot be read: {error.strerror or error}; run again to go on")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        # Not waiting for a writer: a pipe in the place of a picture would hold the worker for ever.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
            yield file  # type: ignore[misc]  # unbuffered: FileIO
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in IMPOSSIBLE:
            raise Unusable(f"path {path.name[:50]}: {error.strerror}") from None
        raise unreadable(path, error) from None
