"""Two steps on an emulated GPU under the recorder.

The allocator's own history has every byte, the recorder says what each block is. Sums that autograd writes into their
first operand are written there, so that the steps take what they take without a recorder.
"""

from __future__ import annotations

import importlib
import itertools
import pickle
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from bigdit.engines import Ema, Engine
from bigdit.engines.state import checkpoint_bytes
from bigdit.errors import versions
from bigdit.files import replacing
from bigdit.memory import Ledger, Timeline, ledger
from bigdit.profile.attempt import UNLIMITED, Profile
from bigdit.profile.notices import notices
from bigdit.profile.request import StepRequest
from bigdit.profile.steps import STEPS, Built, Witness, group, prepare, training
from bigdit.profile.unwritten import large_uncomputed, unwritten_weights
from bigdit.record.recorder import History, Recorder
from bigdit.record.watch import Watch, watching_fsdp2

if TYPE_CHECKING:
    from bigdit.encoders.frozen import FrozenEncoders

_PROTOCOL = 4
"""The newest pickle that pytorch.org/memory_viz reads."""


def recorded(request: StepRequest, built: Built, snapshot: str | None = None) -> Profile:
    """The request on a GPU that has nothing yet; torch's memory snapshot of it goes to the file `snapshot`.

    Raises UserError where that cannot be written, and RuntimeError where the categories of a phase do not sum to
    torch's own peak.
    """
    began, strategy, device = time.perf_counter(), request.strategy, torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.cuda.init()
    importlib.import_module("bigdit_emulated.libraries").limit(UNLIMITED)
    history = History(stacks=snapshot is not None)
    marks = _Marks(Recorder(history))
    with unwritten_weights(), large_uncomputed():
        workload = prepare(request, built)
        watching = watching_fsdp2(marks.recorder) if strategy.engine == "fsdp2" else nullcontext()
        with group(strategy) as world, marks.recorder, watching:
            for _ in itertools.islice(training(workload, device, world, marks), STEPS):
                pass
            marks.watch.close()
            timeline, host_timeline = marks.recorder.timeline(), marks.recorder.host_timeline()
            saved = checkpoint_bytes(*marks.trained)
    summed = ledger(timeline)
    _check(summed, timeline, history.peaks)
    if snapshot is not None:
        with replacing(Path(snapshot)) as temporary:
            temporary.write_bytes(pickle.dumps(history.snapshot, protocol=_PROTOCOL))
    return Profile(
        params=workload.params,
        ledger=summed,
        peak_reserved_bytes=history.peak_reserved_bytes,
        packed_timeline=timeline.pack(),
        packed_host_timeline=host_timeline.pack(),
        checkpoint_bytes=saved,
        versions=versions(),
        notices=notices(strategy, versions()),
        seconds=round(time.perf_counter() - began, 3),
    )


def _check(summed: Ledger, timeline: Timeline, peaks: Sequence[int]) -> None:
    counted: dict[str, int] = {}
    for span, peak in zip(timeline.spans, peaks, strict=True):
        counted[span.phase] = max(counted.get(span.phase, 0), peak)
    for phase in summed.phases:
        if phase.peak_bytes != counted[phase.phase]:
            raise RuntimeError(
                f"the categories of {phase.phase} sum to {phase.peak_bytes} bytes, and torch counted "
                f"{counted[phase.phase]}"
            )


class _Marks(Witness):
    """Tells the recorder what the storages are. `watch` and `trained` are there from `started` on."""

    watch: Watch
    trained: tuple[Engine, Ema | None]

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.recorder.phase(name)

    def built(self, model: nn.Module, frozen: FrozenEncoders | None) -> None:
        self.recorder.mark(model.parameters(), "parameter")
        self.recorder.mark(model.buffers(), "buffer")
        self._frozen = frozen
        self._mark_encoders()

    def started(self, engine: Engine, ema: Ema | None) -> Watch:
        self._mark_encoders()  # the device has them now
        self.watch, self.trained = Watch(self.recorder, engine, ema), (engine, ema)
        return self.watch

    def _mark_encoders(self) -> None:
        self.recorder.mark([] if self._frozen is None else self._frozen.tensors(), "encoder")
