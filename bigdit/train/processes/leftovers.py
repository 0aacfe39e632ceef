"""What killed trainers leave on this machine, and the next start takes away: locks of compilations."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from bigdit import log

_SHARED_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "fuse", "beegfs", "9p", "virtiofs")


def remove_leftovers() -> None:
    """Remove what no living process has in use, and say so, by name.

    Processes are seen within one PID namespace.
    """
    for lock in _unheld_locks(_extensions()):
        if _shared(lock):
            log.notice(f"note: {lock} is held by another machine, or was left by a killed process: then remove it")
        elif _remove(lock):
            log.notice(f"note: removed {lock}, left by a process that was killed while it compiled")


def _extensions() -> Path:
    """Where torch compiles. Source: get_default_build_root in torch/utils/cpp_extension.py, torch 2.13."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")


def _unheld_locks(root: Path) -> list[Path]:
    """The locks of torch's compilations that no process has open; whoever compiles has, and others wait without end."""
    found = [*root.glob("*/lock"), *root.glob("*/*/lock")]
    held = {file for folder in Path("/proc").glob("[0-9]*/fd") for file in _opened(folder)} if found else set()
    return [lock for lock in sorted(found) if str(lock.resolve()) not in held]


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


def _remove(file: Path) -> bool:
    try:
        file.unlink()
    except (FileNotFoundError, PermissionError):
        return False
    return True
