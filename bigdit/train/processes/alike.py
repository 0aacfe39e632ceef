"""Before the first step: whether processes have the same versions and run, and GPUs as free and fast as others."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bigdit import log
from bigdit.config import Stage
from bigdit.config.wrong import shown
from bigdit.dist import World
from bigdit.documents import differences
from bigdit.emulator import on_emulated_gpu
from bigdit.errors import UserError, versions
from bigdit.units import GIB, gib

_OWN = ("data.features", "data.remote_cache", "model.path", "model.init_from")
"""Keys that may name each machine's own copy."""

IN_USE = 2 * GIB
"""Of a GPU's memory, before anything is on it: more is another process's. A context of this one takes up to 1 GiB."""

SLOWER = 1.3
"""A GPU is slow whose matrix product takes that many times the median."""
_SIDE = {"cuda": 4096, "cpu": 256}
_TIMES = 10


@dataclass(frozen=True)
class Found:
    """What one process has: `used_bytes` of its GPU's memory, and seconds of a matrix product; None on a CPU."""

    host: str
    versions: dict[str, str]
    run: dict[str, Any]
    used_bytes: int | None = None
    product_s: float | None = None


def check_alike(stages: Sequence[Stage], world: World, device: torch.device) -> None:
    """Log GPUs that are in use or slow. Raises UserError, on all processes, where versions or runs differ."""
    if world.world_size == 1:
        return
    used = seconds = None
    if device.type == "cuda" and not on_emulated_gpu():
        free, total = torch.cuda.mem_get_info(device)
        used, seconds = total - free - torch.cuda.memory_reserved(device), product_seconds(device)
    run = {each.name if len(stages) > 1 else "": _settings(each) for each in stages}
    mine = Found(socket.gethostname(), versions(), run if len(stages) > 1 else run[""], used, seconds)
    found = [mine] * world.world_size
    dist.all_gather_object(found, mine)
    if different := unlike(found):
        raise UserError(*different)
    for line in notes(found) if world.is_main else ():
        log.notice(f"note: {line}")


def _settings(stage: Stage) -> dict[str, Any]:
    """All keys, with what is in the plan's file."""
    plan = None if stage.plan is None else stage.plan.model_dump(mode="json")
    return {**stage.run.model_dump(mode="json"), "plan": plan}


def unlike(found: Sequence[Found]) -> list[str]:
    """A line for each machine whose versions or run differ from the first rank's."""
    first, lines = found[0], dict[str, str]()
    for rank, each in enumerate(found):
        who = f"rank {rank} on {each.host}"
        for name in first.versions | each.versions:
            own, other = (versions.get(name, "missing") for versions in (each.versions, first.versions))
            if own != other:
                lines.setdefault(
                    f"{each.host} {name}",
                    f"{who} has {name} {own}, and rank 0 on {first.host} has {other}; install the same on all machines",
                )
        for key, own, other in differences(each.run, first.run):
            if key not in _OWN and not key.startswith(tuple(f"{name}." for name in _OWN)):
                lines.setdefault(
                    each.host,
                    f"{who} has {key} {shown(own)}, and rank 0 on {first.host} has {shown(other)}; start all with the "
                    "same YAML, plan and --set",
                )
    return list(lines.values())


def notes(found: Sequence[Found]) -> list[str]:
    """A line for each GPU that is in use, or slower than its peers'."""
    lines = [
        f"rank {rank} on {each.host}: {gib(each.used_bytes)} of its GPU are in use before the run begins"
        for rank, each in enumerate(found)
        if each.used_bytes is not None and each.used_bytes > IN_USE
    ]
    median = statistics.median([each.product_s for each in found if each.product_s is not None] or [0.0])
    return lines + [
        f"rank {rank} on {each.host}: a matrix product takes its GPU {1000 * each.product_s:.3g} ms, and the median "
        f"GPU {1000 * median:.3g} ms; look at its clocks, power limit and temperature"
        for rank, each in enumerate(found)
        if each.product_s is not None and each.product_s > SLOWER * median
    ]


def product_seconds(device: torch.device) -> float:
    """The median seconds of a matrix product in bf16. It leaves no memory behind."""
    side = _SIDE[device.type]
    factor, took = torch.ones(side, side, dtype=torch.bfloat16, device=device), []
    for _ in range(_TIMES):
        began = time.perf_counter()
        float((factor @ factor)[0, 0])  # waits for it
        took.append(time.perf_counter() - began)
    del factor
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return statistics.median(took)
