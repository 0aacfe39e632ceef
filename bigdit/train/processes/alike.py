"""Checks across processes. At the start: the same versions and run, and GPUs and links that are free and fast. During
training: whether replicas stay equal."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from bigdit import log
from bigdit.checkpoint import Peers
from bigdit.config.stages import Stage
from bigdit.config.wrong import shown
from bigdit.dist import World
from bigdit.documents import differences
from bigdit.emulator import on_emulated_gpu
from bigdit.engines import Ema, Engine
from bigdit.engines.state import replicated
from bigdit.errors import UserError, versions
from bigdit.units import GIB, MIB, gib

_OWN = ("data.features", "data.remote_cache", "model.path", "model.init_from")
"""Keys that may name each machine's own copy."""

IN_USE = 2 * GIB
"""Used memory of an empty GPU above which another process must use it; a CUDA context takes up to 1 GiB."""

SLOWER = 1.3
"""A GPU is slow if its matrix product takes this many times the median."""
_SIDE = {"cuda": 4096, "cpu": 256}

SLOWER_LINK = 2.0
"""A link is slow if its all-reduce takes this many times the median of links within a machine, or between machines."""
_SENT = {"cuda": 64 * MIB, "cpu": MIB}

_TIMES = 10


@dataclass(frozen=True)
class Found:
    """What one process has. `used_bytes`: of its GPU's memory; `product_s`: seconds of a matrix product; `link_s`:
    seconds of an all-reduce with the next rank. None on a CPU; the last rank has no `link_s`."""

    host: str
    versions: dict[str, str]
    run: dict[str, Any]
    used_bytes: int | None = None
    product_s: float | None = None
    link_s: float | None = None


def check_alike(stages: Sequence[Stage], world: World, device: torch.device) -> None:
    """Log GPUs that are in use or slow, and slow links. Raises UserError on all processes if versions or runs
    differ."""
    if world.world_size == 1:
        return
    used = product = link = None
    if device.type == "cuda" and not on_emulated_gpu():
        free, total = torch.cuda.mem_get_info(device)
        used = total - free - torch.cuda.memory_reserved(device)
        product, link = product_seconds(device), link_seconds(world, device)
    run = {each.name if len(stages) > 1 else "": _settings(each) for each in stages}
    mine = Found(socket.gethostname(), versions(), run if len(stages) > 1 else run[""], used, product, link)
    found = [mine] * world.world_size
    dist.all_gather_object(found, mine)
    if different := unlike(found):
        raise UserError(*different)
    for line in notes(found) if world.is_main else ():
        log.notice(f"note: {line}")


def _settings(stage: Stage) -> dict[str, Any]:
    """All keys of the run, and the content of its plan."""
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
    """A line for each GPU that is in use or slow, and for each slow link."""
    lines = [
        f"rank {rank} on {each.host}: {gib(each.used_bytes)} of its GPU are in use before the run begins"
        for rank, each in enumerate(found)
        if each.used_bytes is not None and each.used_bytes > IN_USE
    ]
    median = statistics.median([each.product_s for each in found if each.product_s is not None] or [0.0])
    lines += [
        f"rank {rank} on {each.host}: a matrix product takes its GPU {1000 * each.product_s:.3g} ms, and the median "
        f"GPU {1000 * median:.3g} ms; check its clocks, power limit and temperature"
        for rank, each in enumerate(found)
        if each.product_s is not None and each.product_s > SLOWER * median
    ]
    return lines + _slow_links(found, False, "GPUs of a machine") + _slow_links(found, True, "machines")


def _slow_links(found: Sequence[Found], between_machines: bool, ends: str) -> list[str]:
    took = {
        rank: each.link_s
        for rank, (each, following) in enumerate(pairwise(found))
        if each.link_s is not None and (each.host != following.host) == between_machines
    }
    median = statistics.median(took.values() or [0.0])
    return [
        f"rank {rank} on {found[rank].host}: an all-reduce with rank {rank + 1} on {found[rank + 1].host} takes "
        f"{1000 * seconds:.3g} ms, and the median one between {ends} {1000 * median:.3g} ms; check how they are "
        "connected (nvidia-smi topo -m, NCCL_DEBUG=INFO)"
        for rank, seconds in took.items()
        if seconds > SLOWER_LINK * median
    ]


def product_seconds(device: torch.device) -> float:
    """The median seconds of a matrix product in bf16. Its memory is freed."""
    side = _SIDE[device.type]
    factor, took = torch.ones(side, side, dtype=torch.bfloat16, device=device), []
    for _ in range(_TIMES):
        began = time.perf_counter()
        float((factor @ factor)[0, 0])  # waits for the product
        took.append(time.perf_counter() - began)
    del factor
    _free(device)
    return statistics.median(took)


def link_seconds(world: World, device: torch.device) -> float | None:
    """The median seconds of an all-reduce with the next rank; None for the last rank. All processes call this.

    Its memory is freed, with NCCL's for these groups of two.
    """
    sent, seconds = torch.ones(_SENT[device.type], dtype=torch.uint8, device=device), None
    for first in (0, 1):  # ranks 0 and 1, 2 and 3; then 1 and 2, 3 and 4
        pairs = [[rank, rank + 1] for rank in range(first, world.world_size - 1, 2)]
        groups = [(pair, dist.new_group(pair)) for pair in pairs]
        for pair, group in groups:
            if world.rank not in pair:
                continue
            took = [_all_reduce_seconds(sent, group) for _ in range(1 + _TIMES)][1:]  # the first one connects the ranks
            if world.rank == pair[0]:
                seconds = statistics.median(took)
            dist.destroy_process_group(group)
    del sent
    _free(device)
    return seconds


def _all_reduce_seconds(sent: torch.Tensor, group: dist.ProcessGroup) -> float:
    began = time.perf_counter()
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    if sent.is_cuda:
        torch.cuda.synchronize(sent.device)
    return time.perf_counter() - began


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


_RUN = 4096
"""Elements that are summed before they are weighted by their place."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """Compares replicas every `every` steps and before each save: a faulty GPU or its memory makes one differ.

    All processes call it. `every` None: it compares nothing. On a GPU the hash is queued behind the step and read after
    the next one, so that nothing waits for it. It reads the memory once. It cannot find a wrong number that all
    processes received from one of them, such as a gradient, or in a part that only one process holds.
    """

    def __init__(self, engine: Engine, ema: Ema | None, peers: Peers, every: int | None) -> None:
        self._engine, self._ema, self._peers = engine, ema, peers
        self._every = every if peers.world.world_size > 1 else None
        self._waiting: tuple[int, dict[str, int | torch.Tensor]] | None = None

    def add(self, step: int, *, saved: bool) -> None:
        """Add the state after `step` steps; `saved`: it is about to be saved. Raises UserError if processes differ."""
        if self._waiting is not None:
            self._compare(*self._waiting)
            self._waiting = None
        if self._every is None or not (saved or step % self._every == 0):
            return
        hashed = step, {name: digest(each) for name, each in replicated(self._engine, self._ema)}
        if saved:
            self._compare(*hashed)
        else:
            self._waiting = hashed

    def _compare(self, step: int, hashed: dict[str, int | torch.Tensor]) -> None:
        held = self._engine.replicas()
        mine = dict(zip(hashed, _on_host(list(hashed.values())), strict=True))
        together = xxhash.xxh3_64_hexdigest(repr(mine).encode())
        found = self._peers.gather(((held.ranks if held else (self._peers.world.rank,)), together))
        if all(found[rank][1] == digests for ranks, digests in found for rank in ranks):
            return
        everything = self._peers.gather((f"process {os.getpid()} on {socket.gethostname()}", mine))
        for ranks in sorted({ranks for ranks, _ in found}):
            (most, count), *others = Counter(found[rank][1] for rank in ranks).most_common()
            if not others:
                continue
            right = [rank for rank in ranks if found[rank][1] == most] if 2 * count > len(ranks) else []
            wrong = [rank for rank in ranks if rank not in right]
            values = [everything[rank][1] for rank in ranks]
            where = next((name for name in mine if len({each.get(name) for each in values}) > 1), "")
            places = ", ".join(f"rank {rank} ({everything[rank][0]})" for rank in wrong)
            what = "differs from its replicas" if right else "differ from each other, and should not"
            raise UserError(
                f"{places} {what} after step {step}, first in {where}: a GPU or its memory may be faulty; the same "
                "command, without that GPU, resumes from the last checkpoint, where all were alike"
            )


def digest(tensor: torch.Tensor) -> int | torch.Tensor:
    """A hash of the tensor's bits. For a tensor on a GPU it stays there, so that nothing waits."""
    return sums(tensor) if tensor.is_cuda else xxhash.xxh3_64_intdigest(_flat(tensor).numpy())


def sums(tensor: torch.Tensor) -> torch.Tensor:
    """A hash by sums of integers. They need a 500th of the tensor's bytes: a full GPU has no room for more."""
    flat = _flat(tensor)
    even = flat.numel() // _RUN * _RUN
    runs = flat[:even].view(-1, _RUN).sum(1, dtype=torch.int64)
    runs = torch.cat([runs, flat[even:].sum(dtype=torch.int64).view(1)])
    return (runs * torch.arange(1, 2 * len(runs), 2, device=runs.device)).sum()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def _on_host(values: list[int | torch.Tensor]) -> list[int]:
    """All numbers, with one wait for the device."""
    on_device = [each for each in values if isinstance(each, torch.Tensor)]
    numbers = iter(torch.stack(on_device).tolist() if on_device else ())
    return [next(numbers) if isinstance(each, torch.Tensor) else each for each in values]
