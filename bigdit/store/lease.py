"""What workers have in hand: each has a folder in the store, whose name tells whether its process still lives.

`workers/NAME/part-…` marks a range that a worker is at, beside the file it writes, which is renamed to its place in
the store when it is whole. What a dead worker left is removed when it is known to be dead: its process is gone from
this machine, as the kernel knows it. No clock is asked, so none can err. Of other machines nothing is known.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bigdit.errors import UserError

FOLDER = "workers"

Fate = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True)
class WorkerName:
    """A process, among all of all machines: `boot` and `space` say where its `pid` counts, `started` (clock ticks since
    boot) which of those that had this pid it is; `token` is random."""

    host: str
    boot: str
    space: str
    pid: int
    started: int
    token: str

    def __str__(self) -> str:
        return "_".join((self.host, self.boot, self.space, str(self.pid), str(self.started), self.token))

    @classmethod
    def here(cls) -> WorkerName:
        """This process, with a new token."""
        pid = os.getpid()
        return cls(*_place(), pid, _started(pid) or 0, uuid.uuid4().hex[:8])

    @classmethod
    def parse(cls, name: str) -> WorkerName | None:
        """The process that a folder is named after; None where it is not so named."""
        words = name.rsplit("_", 5)
        if len(words) != 6 or not (words[3].isdecimal() and words[4].isdecimal()):
            return None
        return cls(words[0], words[1], words[2], int(words[3]), int(words[4]), words[5])

    def fate(self) -> Fate:
        """Unknown where the process is not one of this machine, since it was started, and of this pid namespace."""
        if (self.host, self.boot, self.space) != _place():
            return "unknown"
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "dead"
        except PermissionError:  # another user's, which /proc may hide
            return "alive"
        return "alive" if _started(self.pid) == self.started else "dead"


@dataclass(frozen=True)
class Lease:
    """A worker's folder: its process' name and fate, the marks of the ranges it is at, the bytes of its files."""

    folder: Path
    worker: WorkerName
    fate: Fate
    marks: tuple[str, ...]
    nbytes: int


@contextlib.contextmanager
def own_folder(root: Path) -> Iterator[Path]:
    """A folder of this process alone in the store at `root`, removed at the end. Raises UserError where it cannot."""
    folder = root / FOLDER / str(WorkerName.here())
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def all_leases(root: Path) -> list[Lease]:
    """The folders of all workers of the store at `root`."""
    found = []
    for name, worker in _workers(root):
        files = {}
        with contextlib.suppress(FileNotFoundError):  # its worker ends just now
            for entry in os.scandir(root / FOLDER / name):
                with contextlib.suppress(FileNotFoundError):
                    files[entry.name] = entry.stat().st_size
        marks = tuple(sorted(file for file in files if file.startswith("part-")))
        found.append(Lease(root / FOLDER / name, worker, worker.fate(), marks, sum(files.values())))
    return found


def all_marks(root: Path) -> set[str]:
    """File names of the parts that workers, living or dead, are at."""
    marks: set[str] = set()
    for name, _ in _workers(root):
        with contextlib.suppress(FileNotFoundError):
            marks.update(os.listdir(root / FOLDER / name))
    return marks


def remove_left(root: Path, *, other_machines: bool = False) -> list[Lease]:
    """Remove what workers that are known to be dead left, and, if asked, what those of other machines did."""
    fates = ("dead", "unknown") if other_machines else ("dead",)
    left = [lease for lease in all_leases(root) if lease.fate in fates]
    for lease in left:
        shutil.rmtree(lease.folder, ignore_errors=True)  # another extraction may be removing it too
    return left


def _workers(root: Path) -> Iterator[tuple[str, WorkerName]]:
    try:
        names = sorted(os.listdir(root / FOLDER))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        worker = WorkerName.parse(name)
        if worker is not None:
            yield name, worker


def _place() -> tuple[str, str, str]:
    """This machine, this boot of it, and the namespace in which pids are counted."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
    space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return socket.gethostname(), boot, space


def _started(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None of one that has ended, or cannot be seen.

    Source: proc_pid_stat(5), fields 3 and 22; the name in field 2 may hold spaces and parentheses.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
