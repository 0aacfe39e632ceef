"""Two steps on an emulated GPU under the recorder.

The allocator's own history has every byte, the recorder says what each block is. Sums that autograd writes into their
first operand are written there, so that the steps take what they take without a recorder.
"""

from __future__ import annotations

import importlib
import pickle
import time
from pathlib import Path

import torch

from bigdit.errors import versions
from bigdit.files import replacing
from bigdit.memory import ledger
from bigdit.profile.attempt import UNLIMITED, Profile
from bigdit.profile.notices import notices
from bigdit.profile.recording import Recording, record_steps
from bigdit.profile.request import StepRequest
from bigdit.profile.steps import group, prepare
from bigdit.profile.uncomputed import large_uncomputed
from bigdit.profile.unwritten import unwritten_weights
from bigdit.record import Recorder

_PROTOCOL = 4
"""The newest pickle that pytorch.org/memory_viz reads."""


def recorded(request: StepRequest, snapshot: str | None = None) -> Profile:
    """The request on a GPU that has nothing yet; torch's memory snapshot of it goes to the file `snapshot`.

    Raises UserError where that cannot be written, and RuntimeError where the categories of a phase do not sum to
    torch's own peak.
    """
    began = time.perf_counter()
    torch.cuda.set_device(0)
    torch.cuda.init()
    importlib.import_module("bigdit_emulated.libraries").limit(UNLIMITED)
    recorder = Recorder("cuda", stacks=snapshot is not None)
    with unwritten_weights(), large_uncomputed():
        found = _record(request, recorder, torch.device("cuda", 0))
    summed = ledger(found.device)
    counted: dict[str, int] = {}
    for span, peak in zip(found.device.spans, recorder.peaks(), strict=True):
        counted[span.phase] = max(counted.get(span.phase, 0), peak)
    for phase in summed.phases:
        if phase.peak_bytes != counted[phase.phase]:
            raise RuntimeError(
                f"the categories of {phase.phase} sum to {phase.peak_bytes} bytes, and torch counted "
                f"{counted[phase.phase]}"
            )
    if snapshot is not None:
        with replacing(Path(snapshot)) as temporary:
            temporary.write_bytes(pickle.dumps(recorder.snapshot, protocol=_PROTOCOL))
    installed = versions()
    return Profile(
        params=found.params,
        ledger=summed,
        peak_reserved_bytes=recorder.peak_reserved_bytes,
        packed_timeline=found.device.pack(),
        packed_host_timeline=found.host.pack(),
        checkpoint_bytes=found.checkpoint_bytes,
        versions=installed,
        notices=notices(request.strategy, installed),
        seconds=round(time.perf_counter() - began, 3),
    )


def _record(request: StepRequest, recorder: Recorder, device: torch.device) -> Recording:
    workload = prepare(request.model, request.batch, request.strategy, request.encoders)
    with group(request.strategy) as world:
        return record_steps(workload, request.objective, device, world, recorder)
