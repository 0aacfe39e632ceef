"""Memory that ran out: how errors of it are known, and what was asked for and what there was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bigdit.errors import UserError
from bigdit.units import gib, parse_bytes

# What torch, its allocator of the host, cuBLAS and NCCL say; the first is torch.OutOfMemoryError's.
SIGNS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


def ran_out(error: BaseException) -> bool:
    """Whether a card's memory, or the host's, was too small."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


@contextmanager
def told(what: str, device: torch.device, less: str) -> Iterator[None]:
    """Make an error of memory within a UserError: that `what` ran out of it, what there was, and what takes `less`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise UserError(f"{what} ran out of memory: {shortage(error, device)}; {less}") from error


def asked_bytes(message: str) -> int | None:
    """What the allocation that failed asked for, as torch says it."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+ \w+?)\.", message)
    return None if found is None else parse_bytes(found[1].replace("bytes", "B"))


def shortage(error: BaseException, device: torch.device) -> str:
    """What was asked for of a device, and what it had."""
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    return said(asked_bytes(str(error)), *room(device), reserved)


def room(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a card, or of this machine. Source: proc_meminfo(5)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    with open("/proc/meminfo") as file:
        found = dict(line.split(":", 1) for line in file)
    free, total = (parse_bytes(found[key].replace("kB", "KiB")) for key in ("MemAvailable", "MemTotal"))
    return free, total


def said(asked: int | None, free: int, total: int, reserved: int | None = None) -> str:
    """`2.00 GiB were asked for, 1.20 GiB of 44.35 GiB were free, torch had 43.00 GiB`."""
    of_it = "" if asked is None else f"{gib(asked)} were asked for, "
    held = "" if reserved is None else f", torch had {gib(reserved)}"
    return f"{of_it}{gib(free)} of {gib(total)} were free{held}"
