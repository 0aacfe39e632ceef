"""Compares what several processes hold alike: a GPU that computes wrong, or whose memory does, makes one differ.

On a GPU the hash is queued behind the step, and read after the next one: nothing waits for it. It reads the memory
once. Nothing finds a wrong number that all processes got from one of them: a wrong gradient, or a part that only one
holds.
"""

from __future__ import annotations

import os
import socket
from collections import Counter

import torch
import xxhash

from bigdit.checkpoint import Peers
from bigdit.engines import Ema, Engine
from bigdit.engines.state import replicated
from bigdit.errors import UserError

_RUN = 4096
"""Elements that are summed before their place counts."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """Compares every `every` steps, and before each save; all processes call it alike. None: it compares nothing."""

    def __init__(self, engine: Engine, ema: Ema | None, peers: Peers, every: int | None) -> None:
        self._engine, self._ema, self._peers = engine, ema, peers
        self._every = every if peers.world.world_size > 1 else None
        self._waiting: tuple[int, dict[str, int | torch.Tensor]] | None = None

    def add(self, step: int, *, saved: bool) -> None:
        """After `step` steps, which are about to be `saved`. Raises UserError where processes differ."""
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
        mine = {name: int(each) for name, each in zip(hashed, _on_host(list(hashed.values())), strict=True)}
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
    """A hash of the tensor's bits: of one on a GPU still there, and not waited for."""
    return sums(tensor) if tensor.is_cuda else xxhash.xxh3_64_intdigest(_flat(tensor).numpy())


def sums(tensor: torch.Tensor) -> torch.Tensor:
    """The same by sums of integers, which need a 500th of the tensor's bytes: a full GPU has no room for more."""
    flat = _flat(tensor)
    even = flat.numel() // _RUN * _RUN
    runs = flat[:even].view(-1, _RUN).sum(1, dtype=torch.int64)
    runs = torch.cat([runs, flat[even:].sum(dtype=torch.int64).view(1)])
    return (runs * torch.arange(1, 2 * len(runs), 2, device=runs.device)).sum()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def _on_host(values: list[int | torch.Tensor]) -> list[int]:
    """All numbers. The device is waited for once, not for each."""
    there = [each for each in values if isinstance(each, torch.Tensor)]
    numbers = iter(torch.stack(there).tolist() if there else ())
    return [next(numbers) if isinstance(each, torch.Tensor) else each for each in values]
