"""Members of a tar by their headers alone: nothing is extracted, and what no data set needs is refused.

Python's tarfile reads the headers; it is given no more bytes than honest headers take, and what it lets pass (the
end that is missing, a damaged header in the middle, data behind the end) is checked here.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bigdit.files import IS_LFS_POINTER, is_lfs_pointer, open_file

BLOCK = tarfile.BLOCKSIZE
HEADER_BYTES = 2**16  # the headers of one member, extended ones with long names and attributes included
TAIL_BYTES = 2**20  # zeros behind the end: tools fill up to a record, of 10 KiB as a rule
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class Refused(Exception):
    """Why a tar is not read."""


@dataclass(frozen=True)
class Member:
    """A regular file within a tar: its name, and where its bytes are."""

    name: str
    offset: int
    size: int


def members(path: Path) -> Iterator[Member]:
    """All regular files of the tar, in order; folders are passed over. Raises Refused, with the reason, for names
    that are absolute or climb, links, devices, sparse files, and for cut, damaged, compressed and unreadable tars."""
    try:
        yield from _members(path)
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror}") from None


def _members(path: Path) -> Iterator[Member]:
    with open_file(path) as file:
        headers = _Headers(file.fileno())
        if headers.pread(0, 6).startswith(COMPRESSED):
            raise Refused("is compressed, and members cannot be read at their offsets; decompress it")
        if is_lfs_pointer(headers.pread(0, BLOCK)):
            raise Refused(IS_LFS_POINTER)
        if not headers.size:
            raise Refused("is empty")
        try:
            archive = tarfile.open(fileobj=headers, mode="r:")  # type: ignore[call-overload]  # noqa: SIM115
            while (member := archive.next()) is not None:
                archive.members.clear()  # it would keep them all
                headers.renew()
                if not member.isdir():
                    yield _checked(member, headers.size)
        except (tarfile.TarError, ValueError, ArithmeticError, RecursionError, LookupError) as error:
            raise Refused(f"is damaged or cut: {error}") from None
        _check_end(headers, archive.offset)


class _Headers:
    """The tar as a file object that reads headers, of so many bytes a member at most."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._position = 0
        self.renew()

    def renew(self) -> None:
        """Allow the headers of one more member."""
        self._left = HEADER_BYTES

    def pread(self, offset: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, offset)

    def read(self, count: int) -> bytes:
        self._left -= count
        if count < 0 or self._left < 0:
            raise Refused(f"has a member whose headers take more than {HEADER_BYTES} bytes")
        data = self.pread(self._position, count)
        self._position += len(data)
        return data

    def seek(self, position: int) -> None:
        self._position = position

    def tell(self) -> int:
        return self._position


def _checked(member: tarfile.TarInfo, size: int) -> Member:
    name = member.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    shown = ascii(name[:100])
    if name.startswith("/") or ".." in name.split("/"):
        raise Refused(f"has the member {shown}, whose name leads out of it")
    if member.issym() or member.islnk():
        raise Refused(f"has the member {shown}, a link to {member.linkname[:100]!a}")
    if member.issparse():
        raise Refused(f"has the member {shown}, a sparse file")
    if not member.isreg():
        raise Refused(f"has the member {shown}, which is a device or of no known type")
    if member.size < 0 or member.offset_data + member.size > size:
        raise Refused(f"is cut: {shown} of {member.size} bytes goes beyond its end")
    return Member(name.removeprefix("./"), member.offset_data, member.size)


def _check_end(headers: _Headers, end: int) -> None:
    """tarfile stops at whatever is no header."""
    tail = headers.size - end
    if tail < BLOCK:
        raise Refused("is cut: the mark of its end is missing")
    if any(headers.pread(end, BLOCK)):
        raise Refused(f"has a damaged header at byte {end}")
    if tail > TAIL_BYTES or any(headers.pread(end, tail)):
        raise Refused(f"goes on behind the mark of its end at byte {end}; tars are not joined by cat")
