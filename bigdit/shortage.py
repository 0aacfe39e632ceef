"""Errors of memory that ran out: which they are, what was requested, and what was free."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bigdit.errors import UserError
from bigdit.machine import memory_bytes
from bigdit.units import gib, parse_bytes

# Parts of the errors of torch, its CPU allocator, cuBLAS and NCCL; the first is torch.OutOfMemoryError's.
SIGNS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that GPU memory, or CPU memory, was too small."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


@contextmanager
def memory_errors(what: str, device: torch.device, less: str) -> Iterator[None]:
    """Turn a memory error within into a UserError: `what` ran out, what was free, and what takes `less`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise UserError(f"{what} ran out of memory: {shortage(error, device)}; {less}") from error


@contextmanager
def bounded(device: torch.device) -> Iterator[None]:
    """Within it, allocations fail when CPU memory is used up, as on a GPU. Otherwise the kernel would kill the process.

    Source: getrlimit(2), RLIMIT_DATA; proc_pid_status(5), VmData.
    """
    if device.type != "cpu":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    most = min(_held() + room(device)[0], memory_bytes(), *limits)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def asked_bytes(message: str) -> int | None:
    """The bytes that the failed allocation asked for, from torch's message."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+ \w+?)\.", message)
    return None if found is None else parse_bytes(found[1].replace("bytes", "B"))


def shortage(error: BaseException, device: torch.device) -> str:
    """A message: the requested memory of a device, and what was free.

    With `bounded` CPU memory, it has this process's limit instead, since much memory is free again by now.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if device.type == "cpu" and limit != resource.RLIM_INFINITY:
        asked, (_, total) = asked_bytes(str(error)), room(device)
        of_it = "more was" if asked is None else f"{gib(asked)} more were"
        return f"{of_it} asked for, and this process may hold {gib(limit)} of {gib(total)}"
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = f", and this process may have {gib(space)} of address space (ulimit -v)"
    return message(asked_bytes(str(error)), *room(device), reserved) + (
        limited if space != resource.RLIM_INFINITY else ""
    )


def room(device: torch.device) -> tuple[int, int]:
    """Bytes that a GPU, or this machine, has left for this process, and its total. Source: proc_meminfo(5)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    free, total = (_table("/proc/meminfo", key) for key in ("MemAvailable", "MemTotal"))
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return free if limit == resource.RLIM_INFINITY else min(free, max(limit - _held(), 0)), total


def _held() -> int:
    """The bytes that count against RLIMIT_DATA."""
    return _table("/proc/self/status", "VmData")


def _table(path: str, key: str) -> int:
    """Bytes in a row of a table under /proc."""
    with open(path) as file:
        found = dict(line.split(":", 1) for line in file)
    return parse_bytes(found[key].replace("kB", "KiB"))


def message(asked: int | None, free: int, total: int, reserved: int | None = None) -> str:
    """`2.00 GiB were asked for, 1.20 GiB of 44.35 GiB were free, torch had 43.00 GiB`."""
    of_it = "" if asked is None else f"{gib(asked)} were asked for, "
    held = "" if reserved is None else f", torch had {gib(reserved)}"
    return f"{of_it}{gib(free)} of {gib(total)} were free{held}"
