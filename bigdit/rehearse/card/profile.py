"""Two steps on an emulated card under the recorder: `python -m bigdit.rehearse.card.profile LANE…` (forks.py).

The allocator's own history has every byte, the recorder says what each block is. Sums that autograd writes into their
first operand are written there, so that the steps take what they take without a recorder.
"""

from __future__ import annotations

import os
import sys
import time

from bigdit.errors import guard, versions
from bigdit.memory import CUDA_GRANULARITY, ledger
from bigdit.rehearse.card.imports import import_all, import_for
from bigdit.rehearse.forks import serve, taken
from bigdit.rehearse.request import RehearsalRequest, RehearsedSize


def main(given: list[str]) -> None:
    """Answer until all lanes are closed."""
    lanes = taken(given)
    import_all()
    serve(lanes, lambda line: import_for(_request(line)), _answer)


def profile(request: RehearsalRequest) -> RehearsedSize:
    """Two steps of the request's first micro-batch size, where the card has nothing yet.

    Raises RuntimeError where the categories of a phase do not sum to torch's own peak.
    """
    import torch

    from bigdit.record import Recorder
    from bigdit.rehearse.card.steps import group
    from bigdit.rehearse.card.uncomputed import large_uncomputed
    from bigdit.rehearse.card.unwritten import unwritten_weights
    from bigdit.rehearse.recording import record_steps
    from bigdit.rehearse.steps import prepare

    began = time.perf_counter()
    strategy = request.strategy.with_micro_batch_size(request.micro_batch_sizes[0])
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.cuda.init()
    with unwritten_weights():
        workload = prepare(request.model, request.batch, strategy, request.encoders)
    recorder = Recorder("cuda")
    with group(strategy) as world, large_uncomputed():
        found = record_steps(workload, request.objective, device, world, recorder)
    summed = ledger(found.device, CUDA_GRANULARITY)
    counted: dict[str, int] = {}
    for span, peak in zip(found.device.spans, recorder.peaks(), strict=True):
        counted[span.phase] = max(counted.get(span.phase, 0), peak)
    for phase in summed.phases:
        if phase.peak_bytes != counted[phase.phase]:
            raise RuntimeError(
                f"the categories of {phase.phase} sum to {phase.peak_bytes} bytes, and torch counted "
                f"{counted[phase.phase]}"
            )
    return RehearsedSize(
        micro_batch_size=strategy.micro_batch_size,
        params=found.params,
        ledger=summed,
        packed_timeline=found.device.pack(),
        packed_host_timeline=found.host.pack(),
        checkpoint_bytes=found.checkpoint_bytes,
        versions=versions(),
        notices=(),
        seconds=round(time.perf_counter() - began, 3),
    )


def _answer(line: str) -> tuple[str, bool]:
    return profile(_request(line)).model_dump_json(), False


def _request(line: str) -> RehearsalRequest:
    return RehearsalRequest.model_validate_json(line)


if __name__ == "__main__":
    status = guard(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # threads of process groups may abort at exit
