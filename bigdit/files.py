"""Safe reads and writes of files.

A write uses a temporary name, fsync, rename and fsync of the folder, so that files with final names are complete. A
read opens only regular files up to a size limit, and recognises Git LFS pointers.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from bigdit import log
from bigdit.errors import UserError
from bigdit.units import gib

TEMPORARY = ".tmp-"
FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of file systems without locks: Lustre without the mount option flock, some FUSE and object stores.
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

IS_LFS_POINTER = "is a Git LFS pointer, not the file: run `git lfs pull`"
_LFS = b"version https://git-lfs.github.com/spec/"
"""How a pointer begins. Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md"""


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that begins with `start` is a Git LFS pointer."""
    return start.startswith(_LFS)


def lfs_pointer(path: Path) -> str | None:
    """The problem of a Git LFS pointer: this file, or a file in this folder; None without one."""
    with contextlib.suppress(OSError):  # a later read reports it
        for file in filter(Path.is_file, sorted(path.iterdir()) if path.is_dir() else [path]):
            with file.open("rb") as opened:
                if is_lfs_pointer(opened.read(len(_LFS))):
                    return f"{file} {IS_LFS_POINTER}"
    return None


MOST_BYTES = 2**24
"""The most bytes of a file that is read whole. The largest index of weights has about 1 MB."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path) -> None:
    """Raise OSError unless `path`, links followed, is a regular file: reading a pipe may wait forever."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise OSError(errno.ENXIO, f"it is {kind}, and a regular file was expected", str(path))


def open_descriptor(path: Path) -> int:
    """Open a regular file for reading. Raises OSError, also for anything else than a regular file."""
    check_regular(path)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe may have replaced it


def open_file(path: Path) -> BinaryIO:
    """As `open_descriptor`, as a Python file."""
    return open(open_descriptor(path), "rb")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of a regular file. Raises OSError, also for more than `most` bytes."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes, the limit", str(path))
    return data


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a path in a folder is a link to something outside.

    Links of the hub's cache count as inside: models--NAME/snapshots/REVISION/FILE -> ../../blobs/DIGEST. Source:
    huggingface_hub's guide `manage-cache`.
    """
    if not path.is_symlink():
        return False
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = (parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")
    return not any(target.is_relative_to(each) for each in (root, *blobs))


def near(path: Path) -> str:
    """`; did you mean FOLDER/config.json?` for a path that does not exist; empty if its folder has nothing like it."""
    names = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    found = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / found[0]}?" if found else ""


@contextlib.contextmanager
def replacing(path: Path, scratch: Path | None = None) -> Iterator[Path]:
    """A temporary file that replaces `path` when the block ends without error, and is removed otherwise.

    `scratch`: a folder that only this process uses, on the same disk; the file has its final name there. Raises
    UserError if the folder cannot be written or the disk is full.
    """
    temporary = scratch / path.name if scratch else path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # a folder that is read-only, or missing
            temporary.unlink()


def cannot_write(path: Path, error: OSError, what: str = "cannot write") -> UserError:
    """The error for a path that cannot be written."""
    return UserError(f"{what} {path}: {why_unwritten(error, path)}")


@contextlib.contextmanager
def writing_for(key: str) -> Iterator[None]:
    """Adds the key, and that another can be chosen, to errors about what cannot be written."""
    try:
        yield
    except UserError as error:
        problems = error.problems
        raise UserError(*(f"{key}: {each}; choose another" if _WRITES(each) else each for each in problems)) from error


_WRITES = re.compile("cannot (write|export to) ").match


def check_writable(key: str, folder: Path, nbytes: int = 0) -> None:
    """Raise UserError if `folder`, the value of `key`, cannot be made or written, or has no room for `nbytes`. It
    writes a nameless file into the existing part of the path."""
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)) as file:
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise UserError(f"{key}: cannot write {folder}: {why_unwritten(error, folder)}; choose another") from None


def check_ours(folder: Path, what: str, mark: str, ours: Iterable[str]) -> set[str]:
    """The names in `folder`, the value of --out. Raises UserError unless there are none, or one is `mark` and all match
    `ours`: the files of an earlier `what`, which a new one replaces."""
    if not folder.exists():
        return set()
    if not folder.is_dir():
        raise UserError(f"--out: {folder} is a file; name a folder")
    found = {file.name for file in folder.iterdir()}
    if found and mark not in found:
        raise UserError(f"--out: {folder} holds {_some(found)} and no {what}; name another folder, or an empty one")
    if others := {name for name in found if not any(fnmatch(name, each) for each in ours)}:
        raise UserError(
            f"--out: {folder} holds {_some(others)}, which no {what} wrote; move it, or name another folder"
        )
    return found


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (" …" if len(names) > 3 else "")


def why_unwritten(error: OSError, folder: Path) -> str:
    """The system's reason; of a full disk with the free bytes."""
    free = f", {gib(shutil.disk_usage(_existing(folder)).free)} free" if error.errno in FULL else ""
    return f"{error.strerror or error}{free}"


def _existing(folder: Path) -> Path:
    """The part of the path that exists."""
    return folder if os.path.exists(folder) else _existing(folder.parent)


def write_bytes(path: Path, data: bytes, scratch: Path | None = None) -> None:
    """Write a small file, all or nothing; `scratch` as in `replacing`."""
    with replacing(path, scratch) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str, scratch: Path | None = None) -> None:
    """Write a small text file as `write_bytes`."""
    write_bytes(path, text.encode(), scratch)


def create_text(path: Path, text: str, scratch: Path) -> bool:
    """Write a small text file unless it exists; returns False if it does.

    Among several processes, each with its own folder `scratch`, only one succeeds. Raises UserError if the folder
    cannot be written.
    """
    temporary = scratch / path.name
    try:
        temporary.write_text(text)
        fsync(temporary)
        os.link(temporary, path)  # unlike a rename, a link never replaces a file
        fsync(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return True


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document, all or nothing."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill and commit as `folder`. It is removed when the block ends, and a killed process's when
    it begins. Raises OSError if it cannot be made."""
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. Raises UserError if another process has the lock, or it cannot be made.

    The lock is flock(2) on a temporary file, which ends with the process.
    """
    lock, held = folder.with_name(f"{TEMPORARY}{folder.name}.lock"), None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        while held is None:
            held = _locked(lock, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.close()


def _locked(lock: Path, folder: Path) -> BinaryIO | None:
    """The opened and locked file; None if its holder removed it before it was locked."""
    opened = open(lock, "wb")  # noqa: SIM115  # it is closed when the lock ends
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(opened.fileno()), os.stat(lock)):
            return opened
    except BlockingIOError:
        opened.close()
        raise UserError(f"another process is writing {folder}; wait for it, or name another folder") from None
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            opened.close()
            raise
        log.notice(f"note: {lock} cannot be locked ({error.strerror}): a second process would not be noticed")
        return opened
    opened.close()
    return None


def commit_folder(temporary: Path, final: Path, *, replace: bool = True) -> None:
    """Sync a filled temporary folder to disk, and rename it to `final`. Without `replace`, raises OSError if a folder
    with content exists."""
    for each in (*temporary.rglob("*"), temporary):
        fsync(each)
    before = final.with_name(f"{TEMPORARY}before-{final.name}")
    shutil.rmtree(before, ignore_errors=True)
    if replace and final.exists():  # such as a step that is saved again after a resume from an earlier one
        os.replace(final, before)
    os.replace(temporary, final)
    fsync(final.parent)
    shutil.rmtree(before, ignore_errors=True)


def fsync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
