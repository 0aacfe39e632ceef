"""What this machine has, as far as this process may have it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory: all of it, or the least that a control group of this process allows, as containers and SLURM
    set them.

    Source: Control Group v2, memory.max, and cgroups(7) for /proc/self/cgroup and the first version's files.
    """
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    for file in _limit_files(root):
        try:
            text = file.read_text().strip()
        except OSError:  # in a container the groups around its own are not to be seen
            continue
        if text.isdigit():  # and not "max"
            yield int(text)


def _limit_files(root: Path) -> Iterator[Path]:
    """Those of each group that this process is in, and of all groups around them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, name = ("memory", "memory.limit_in_bytes") if controllers else (".", "memory.max")
        group = Path(path)
        for each in (group, *group.parents):
            yield root / "sys/fs/cgroup" / mounted / each.relative_to("/") / name
