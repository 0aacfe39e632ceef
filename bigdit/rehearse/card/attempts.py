"""The process that answers attempts, one after another: `python -m bigdit.rehearse.card.attempts`.

It reads a pair `ASKED.json<tab>ANSWER.json` a line. A model and its engine are made for each and taken apart again; a
process whose card is not empty then says so, and is asked no more: none is answered beside what another one left.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import time
from pathlib import Path

import torch

from bigdit.engines import Ema, Engine, deepspeed
from bigdit.errors import guard
from bigdit.files import write_text
from bigdit.log import quiet_libraries
from bigdit.rehearse.card.attempt import Asked, Attempt
from bigdit.rehearse.card.steps import group
from bigdit.rehearse.card.unwritten import unwritten_weights
from bigdit.rehearse.request import RehearsalRequest
from bigdit.rehearse.steps import STEPS, Witness, prepare, training

_LEFT_BEHIND = 4
"""The status of an answer that holds, and is the last one of its process, whose card is not empty."""


def main() -> None:
    """Answer one question after another, until there are no more."""
    quiet_libraries()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.cuda.set_device(0)
    torch.cuda.init()
    for line in sys.stdin:
        asked, answered = map(Path, line.rstrip("\n").split("\t"))
        status = guard(functools.partial(_answer, asked, answered)) or (0 if _emptied() else _LEFT_BEHIND)
        print(f"{answered}\t{status}", file=answers, flush=True)


def _answer(asked: Path, answered: Path) -> None:
    question = Asked.model_validate_json(asked.read_text())
    write_text(answered, attempt(question.request, question.capacity_bytes).model_dump_json())


def attempt(request: RehearsalRequest, capacity_bytes: int) -> Attempt:
    """Two steps of the request's first micro-batch size, where torch may reserve so many bytes of the card."""
    began = time.perf_counter()
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(capacity_bytes / total, 1.0))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    said = None
    try:
        _two_steps(request, device)
    except torch.OutOfMemoryError as error:
        said = str(error)
    return Attempt(
        out_of_memory=said,
        retries=torch.cuda.memory_stats()["num_alloc_retries"] - before,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        seconds=round(time.perf_counter() - began, 3),
    )


def _two_steps(request: RehearsalRequest, device: torch.device) -> None:
    strategy = request.strategy.with_micro_batch_size(request.micro_batch_sizes[0])
    with unwritten_weights():
        workload = prepare(request.model, request.batch, strategy, request.encoders)
    witness = _Started()
    try:
        with group(strategy) as world:
            steps = training(workload, request.objective, device, world, witness)
            if not all(itertools.islice(steps, STEPS)):
                raise RuntimeError(
                    "a step was not taken, since its gradients are not finite: no optimizer state was made"
                )
    finally:
        if strategy.engine == "deepspeed":
            deepspeed.forget(witness.engine)


class _Started(Witness):
    """Keeps the engine, which DeepSpeed's hooks would otherwise keep alive beyond the attempt."""

    engine: Engine | None = None

    def started(self, engine: Engine, ema: Ema | None) -> None:
        self.engine = engine


def _emptied() -> bool:
    """Take away what lay in cycles, and what torch and cuBLAS keep; whether the card is empty then."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() == 0


if __name__ == "__main__":
    status = guard(main)
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
