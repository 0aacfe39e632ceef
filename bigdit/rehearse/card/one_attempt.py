"""Two steps on a card that has nothing, within so many bytes, and nothing on the card after them."""

from __future__ import annotations

import functools
import gc
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from bigdit.engines import Ema, Engine
from bigdit.rehearse.card.attempt import Asked, Attempt
from bigdit.rehearse.card.launched import Launched, launched
from bigdit.rehearse.card.steps import group
from bigdit.rehearse.card.uncomputed import large_uncomputed
from bigdit.rehearse.card.unwritten import unwritten, unwritten_weights
from bigdit.rehearse.request import RehearsalRequest
from bigdit.rehearse.steps import STEPS, Witness, prepare, training


def attempt(asked: Asked) -> Attempt:
    """Two steps of the request's first micro-batch size, where torch may reserve so many bytes of the card."""
    began = time.perf_counter()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.cuda.init()
    importlib.import_module("bigdit_emulated.libraries").limit(asked.capacity_bytes, final=not asked.to_end)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    said, counted = None, dict[str, Launched]()
    try:
        counted = _two_steps(asked.request, device)
    except torch.OutOfMemoryError as error:
        said = str(error)
    return Attempt(
        out_of_memory=said,
        retries=torch.cuda.memory_stats()["num_alloc_retries"] - before,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        launched=counted,
        seconds=round(time.perf_counter() - began, 3),
    )


@functools.cache
def leave_values() -> None:
    """Have this process compute none from now on, which emulator/inside does under a name of its own."""
    importlib.import_module("bigdit_emulated.values").leave()


def _two_steps(request: RehearsalRequest, device: torch.device) -> dict[str, Launched]:
    """What the second step had the card do, by phase."""
    strategy = request.strategy.with_micro_batch_size(request.micro_batch_sizes[0])
    with unwritten_weights():
        workload = prepare(request.model, request.batch, strategy, request.encoders)
    witness = _Counting()
    try:
        with group(strategy) as world, large_uncomputed():
            fed = replace(workload, make=unwritten(workload.make))
            steps = training(fed, request.objective, device, world, witness)
            for _ in range(STEPS):
                witness.counted.clear()
                if not next(steps):
                    raise RuntimeError(
                        "a step was not taken, since its gradients are not finite: no optimizer state was made"
                    )
    finally:
        if strategy.engine == "deepspeed":
            from bigdit.engines.deepspeed import forget

            forget(witness.engine)
    return dict(witness.counted)


class _Counting(Witness):
    """Counts what each phase has the card do, and keeps the engine, which DeepSpeed's hooks would otherwise keep alive
    beyond the attempt."""

    engine: Engine | None = None

    def __init__(self) -> None:
        self.counted: dict[str, Launched] = {}
        self._read = importlib.import_module("bigdit_emulated.counts").read

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._read()
        yield
        found = launched(before, self._read())
        self.counted[name] = found if name not in self.counted else self.counted[name] + found

    def started(self, engine: Engine, ema: Ema | None) -> None:
        self.engine = engine


def emptied() -> bool:
    """Take away what lay in cycles, and what torch and cuBLAS keep; whether the card is empty then."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() == 0
