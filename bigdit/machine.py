"""The memory of this machine, and the limits of this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory: the machine's, or the smallest limit of this process's control groups (containers, SLURM).

    Source: Control Group v2, memory.max, and cgroups(7) for /proc/self/cgroup and the first version's files.
    """
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_limits(root, "memory", "limit_in_bytes", "max")])


def limits(root: Path = Path("/")) -> str:
    """This process's limits on processes, threads and address space, for a message; empty without limits.

    Source: getrlimit(2), RLIMIT_NPROC and RLIMIT_AS; Control Group v2, pids.max.
    """
    users, space = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NPROC, resource.RLIMIT_AS))
    counts = [(count, "pids.max of its control group") for count in _limits(root, "pids", "max", "max")]
    counts += [(users, "ulimit -u")] if users != resource.RLIM_INFINITY else []
    found = [f"{count} processes and threads ({name})" for count, name in sorted(counts)[:1]]
    found += [f"{space / 2**30:.2f} GiB of address space (ulimit -v)"] if space != resource.RLIM_INFINITY else []
    return " and ".join(found)


def _limits(root: Path, controller: str, first: str, second: str) -> Iterator[int]:
    """The numbers in a controller's file of each group; `first` and `second`: its name in the two versions."""
    for file in _limit_files(root, controller, first, second):
        try:
            text = file.read_text().strip()
        except OSError:  # a container does not see outer groups
            continue
        if text.isdigit():  # else "max"
            yield int(text)


def _limit_files(root: Path, controller: str, first: str, second: str) -> Iterator[Path]:
    """The files of this process's groups and of all outer groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted, name = (controller, f"{controller}.{first}") if controllers else (".", f"{controller}.{second}")
        group = Path(path)
        for each in (group, *group.parents):
            yield root / "sys/fs/cgroup" / mounted / each.relative_to("/") / name
