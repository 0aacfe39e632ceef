"""What killed trainers leave on this machine, and the next start takes away: shared memory, locks of compilations."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bigdit import log
from bigdit.units import MIB

SHARED_MEMORY = Path("/dev/shm")
BUFFER = "deepspeed_allreduce_buffer"
"""DeepSpeed's collectives of CPUs: 66 MiB a process. Source: csrc/cpu/comm/shm.cpp, DeepSpeed 0.19."""

# A process that starts makes its buffer and maps it in the next moment.
_YOUNG_S = 2.0
_SHARED_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "fuse", "beegfs", "9p", "virtiofs")


def remove_leftovers() -> None:
    """Remove what no living process has in use, and say so, by name.

    Processes are seen within one PID namespace: containers that share /dev/shm do not see each other's.
    """
    for buffer in _unused_buffers():
        size = buffer.stat().st_size if buffer.exists() else 0
        if _remove(buffer):
            log.notice(f"note: removed {buffer}, {size // MIB} MiB of shared memory that a killed process had left")
    for lock in _unheld_locks(_extensions()):
        if _shared(lock):
            log.notice(f"note: {lock} is held by another machine, or was left by a killed process: then remove it")
        elif _remove(lock):
            log.notice(f"note: removed {lock}, left by a process that was killed while it compiled")


def _unused_buffers() -> list[Path]:
    """This user's buffers that no process has mapped."""
    young = time.time() - _YOUNG_S
    found = [file for file in SHARED_MEMORY.glob(f"{BUFFER}_{os.getuid()}_*") if _changed(file) < young]
    mapped = {line.split(maxsplit=5)[-1] for maps in _processes("maps") for line in _lines(maps)} if found else set()
    return [file for file in sorted(found) if str(file) not in mapped]


def _extensions() -> Path:
    """Where torch compiles. Source: get_default_build_root in torch/utils/cpp_extension.py, torch 2.13."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")


def _unheld_locks(root: Path) -> list[Path]:
    """The locks of torch's compilations that no process has open; whoever compiles has, and others wait without end."""
    found = [*root.glob("*/lock"), *root.glob("*/*/lock")]
    held = {file for folder in _processes("fd") for file in _opened(folder)} if found else set()
    return [lock for lock in sorted(found) if str(lock.resolve()) not in held]


def _processes(name: str) -> Iterator[Path]:
    return Path("/proc").glob(f"[0-9]*/{name}")


def _lines(maps: Path) -> list[str]:
    try:
        return [line for line in maps.read_text(errors="replace").splitlines() if BUFFER in line]
    except OSError:  # it has ended, or is another user's
        return []


def _opened(folder: Path) -> list[str]:
    opened: list[str] = []
    with suppress(OSError):  # the process has ended, or is another user's
        for link in folder.iterdir():
            with suppress(FileNotFoundError):  # closed since, as is what lists this very folder
                opened.append(os.readlink(link))
    return opened


def _shared(path: Path) -> bool:
    """Whether other machines may see the file: by the type of the file system that it is on."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    types = [fields[fields.index("-") + 1] for fields in mounts if fields[2] == number]
    return not types or types[0].startswith(_SHARED_FILE_SYSTEMS)


def _changed(file: Path) -> float:
    try:
        return file.stat().st_ctime
    except FileNotFoundError:  # another process was faster
        return math.inf


def _remove(file: Path) -> bool:
    try:
        file.unlink()
    except (FileNotFoundError, PermissionError):
        return False
    return True
