"""Leases of workers. Each worker has a folder in the store. Its name tells whether the worker's process still lives.

`workers/NAME/part-…` marks a range that a worker encodes. The worker writes the part into this file, and renames it
when it is complete. The files of a dead worker are removed when the kernel of this machine says that its process is
gone. No clock is involved. Nothing is known of processes on other machines.

`pull` picks the next range, without a server or a lock. Two workers may encode the same range. Then both write the
whole part under one name, and on a CPU the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bigdit.files import cannot_write
from bigdit.store.part import part_name, part_path

FOLDER = "workers"

Fate = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True)
class WorkerName:
    """The name of a process, unique among all machines.

    `pid` counts within `boot` and `space`, the pid namespace. `started`, in clock ticks since boot, distinguishes
    processes that had the same pid. `token` is random.
    """

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
        """The process in a folder's name; None for other names."""
        words = name.rsplit("_", 5)
        if len(words) != 6 or not (words[3].isdecimal() and words[4].isdecimal()):
            return None
        return cls(words[0], words[1], words[2], int(words[3]), int(words[4]), words[5])

    def fate(self) -> Fate:
        """Whether the process lives; unknown for other machines, an earlier boot, and other pid namespaces."""
        if (self.host, self.boot, self.space) != _place():
            return "unknown"
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "dead"
        except PermissionError:  # another user's process, which /proc may hide
            return "alive"
        return "alive" if _started(self.pid) == self.started else "dead"


@dataclass(frozen=True)
class Lease:
    """A worker's folder: the name and fate of its process, the marks of its ranges, the bytes of its files."""

    folder: Path
    worker: WorkerName
    fate: Fate
    marks: tuple[str, ...]
    nbytes: int


@contextlib.contextmanager
def own_folder(root: Path) -> Iterator[Path]:
    """Make a folder of this process in the store at `root`, and remove it at the end. Raises UserError on failure."""
    folder = root / FOLDER / str(WorkerName.here())
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(root, error) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def all_leases(root: Path) -> list[Lease]:
    """The folders of all workers of the store at `root`."""
    found = []
    for name, worker in _workers(root):
        files = {}
        with contextlib.suppress(FileNotFoundError):  # its worker has just ended
            for entry in os.scandir(root / FOLDER / name):
                with contextlib.suppress(FileNotFoundError):
                    files[entry.name] = entry.stat().st_size
        marks = tuple(sorted(file for file in files if file.startswith("part-")))
        found.append(Lease(root / FOLDER / name, worker, worker.fate(), marks, sum(files.values())))
    return found


def all_marks(root: Path) -> set[str]:
    """File names of the parts that workers have leased, living or dead."""
    marks: set[str] = set()
    for name, _ in _workers(root):
        with contextlib.suppress(FileNotFoundError):
            marks.update(os.listdir(root / FOLDER / name))
    return marks


def remove_left(root: Path, *, other_machines: bool = False) -> list[Lease]:
    """Remove the folders of dead workers, and with `other_machines` those of unknown ones."""
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
    """This machine, its boot, and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
    space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return socket.gethostname(), boot, space


def _started(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if it has ended, or cannot be seen.

    Source: proc_pid_stat(5), fields 3 and 22; the name in field 2 may hold spaces and parentheses.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def missing(root: Path, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges whose part is not in the store, by one listing of its folder."""
    try:
        done = set(os.listdir(root))
    except FileNotFoundError:
        return list(ranges)
    return [each for each in ranges if part_name(*each) not in done]


def pull(root: Path, ranges: Sequence[tuple[int, int]], generator: random.Random) -> Iterator[tuple[int, int]]:
    """The missing ranges, one after another. The store is checked before each.

    They begin at a random place, and go on at another one whenever the next range is done or leased. So independent
    extractions seldom collide. Leased ranges come last, since their workers may have died.
    """
    left, held = missing(root, ranges), []
    while left:
        at = generator.randrange(len(left))
        while at < len(left):
            each = left.pop(at)
            path = part_path(root, *each)
            if path.exists():
                break
            if path.name in all_marks(root):
                held.append(each)
                break
            yield each
    generator.shuffle(held)
    yield from (each for each in held if not part_path(root, *each).exists())
