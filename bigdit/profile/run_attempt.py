"""Two steps on an emulated GPU: an attempt within so many bytes, or a run under the recorder.

A recorded run takes all bytes from the allocator's own history, and the meaning of blocks from the recorder. Sums that
autograd writes in place are written in place there too, so the recorder changes no allocation.
"""

from __future__ import annotations

import importlib
import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from bigdit.engines import Ema, Engine
from bigdit.engines.state import checkpoint_bytes
from bigdit.errors import UserError, versions
from bigdit.files import replacing
from bigdit.libraries import untested
from bigdit.memory import HostMemory, Ledger, Span, Timeline, ledger
from bigdit.models.equip import CompiledGraphs
from bigdit.profile.attempt import (
    IMAGES,
    TEXTS,
    UNLIMITED,
    UPDATE,
    Attempt,
    AttemptJob,
    Counted,
    Launched,
    PhaseBytes,
    Profile,
    StepRequest,
    launched,
    weights_of,
)
from bigdit.profile.steps import STEPS, Built, Witness, group, prepare, raw_batch, take, training
from bigdit.profile.unwritten import large_uncomputed, unwritten, unwritten_weights
from bigdit.profile.watch import Watch, watching_fsdp2
from bigdit.record.costs import Counting, watching_linear
from bigdit.record.recorder import History, Recorder
from bigdit.strategy import FACTORED, PACKAGES, Strategy

if TYPE_CHECKING:
    from bigdit.encoders.frozen import FrozenEncoders

DEVICE = torch.device("cuda", 0)


def attempt(job: AttemptJob, built: Built, host_bytes: int) -> Attempt:
    """Two steps of the job's request, in which torch may reserve the job's `capacity_bytes`. `built` already takes
    `host_bytes` of CPU memory."""
    return _run_watched(job, host_bytes, lambda watch: _steps(job, built, watch))


def encode(job: AttemptJob) -> Attempt:
    """A micro-batch through the encoders alone, with the same limit."""
    return _run_watched(job, 0, lambda watch: _encoding(job, watch))


def _run_watched(job: AttemptJob, host_bytes: int, run: Callable[[_Watch], None]) -> Attempt:
    began = time.perf_counter()
    torch.cuda.set_device(DEVICE)
    torch.cuda.init()
    importlib.import_module("bigdit_emulated.libraries").limit(job.capacity_bytes, final=not job.to_end)
    watch, message = _Watch(host_bytes), None
    try:
        with unwritten_weights(), large_uncomputed():
            run(watch)
    except torch.OutOfMemoryError as error:
        message = str(error)
    watch.end()
    start, host_steps = watch.host_peaks  # page-locked bytes are included
    return Attempt(
        out_of_memory=message,
        retries=torch.cuda.memory_stats().get("num_alloc_retries", 0),
        peak_allocated_bytes=max(each.peak_bytes for each in watch.phases.values()),
        peak_reserved_bytes=watch.reserved_bytes,
        phases=watch.phases,
        params=watch.params,
        host=HostMemory(peak_bytes=max(start, host_steps), steps_bytes=host_steps, page_locked_bytes=0),
        checkpoint_bytes=0 if message or watch.engine is None else checkpoint_bytes(watch.engine, watch.ema),
        reads=watch.reads,
        launched={} if message else watch.launched,
        packed_work=watch.packed_work,
        block_bytes=watch.block_bytes,
        seconds=round(time.perf_counter() - began, 3),
    )


def _steps(job: AttemptJob, built: Built, watch: _Watch) -> None:
    request = job.request
    workload = prepare(request, built)
    watch.params = workload.params
    blocks = workload.family.blocks(workload.model)
    watch.block_bytes = tuple(sum(each.nbytes for each in block.parameters()) for block in blocks)
    with group(request.strategy), nullcontext() if job.counted == "nothing" else watching_linear():
        fed = replace(workload, make=unwritten(workload.make))
        steps = training(fed, DEVICE, watch)
        for step in range(1, STEPS + 1):
            watch.launched.clear()
            # With ZeRO-3 later steps have a few small broadcasts less: DeepSpeed compares its traces of modules once.
            with watch.counting(job.counted if step == STEPS else "nothing"):
                take(steps)


def _encoding(job: AttemptJob, watch: _Watch) -> None:
    """Run the encoders of images, then those of texts, as if they took turns. Their weights have their own phases."""
    from bigdit.encoders.frozen import FrozenEncoders  # transformers takes seconds to import

    request = job.request
    assert request.encoders is not None
    frozen = FrozenEncoders(request.encoders)
    raw = raw_batch(request.encoders, request.batch, request.strategy)
    sides = {IMAGES: frozen.of_images(), TEXTS: frozen.of_texts()}
    parameters = (each for modules in sides.values() for module in modules for each in module.parameters())
    watch.params = sum(each.numel() for each in parameters)

    def encode() -> None:
        for phase, modules in sides.items():
            with watch.phase(weights_of(phase)):
                for module in modules:
                    module.to(DEVICE)
            with watch.phase(phase):
                if phase == IMAGES:
                    frozen.latents(raw.pixels.to(DEVICE))
                else:
                    frozen.texts([(ids.to(DEVICE), mask.to(DEVICE)) for ids, mask in raw.tokens])
            for module in modules:
                module.to("cpu")
            torch._C._cuda_clearCublasWorkspaces()  # else they would count as weights of the next encoders

    with watch.counting("step"):
        encode()


class _Watch(Witness):
    """Counters of torch, CPU memory and launches, by phase. `host_bytes` of CPU memory are in use before the steps."""

    engine: Engine | None = None
    ema: Ema | None = None

    def __init__(self, host_bytes: int) -> None:
        self.phases: dict[str, PhaseBytes] = {}
        self.launched: dict[str, Launched] = {}
        self.params = self.reads = self.reserved_bytes = 0
        self.packed_work: str | None = None
        self.block_bytes: tuple[int, ...] = ()
        self._counting: Counting | None = None
        self._phase: str | None = None
        self._counts = importlib.import_module("bigdit_emulated.libraries").read_counts
        self._host = importlib.import_module("bigdit_emulated.host").tensor_bytes
        self._host_before = self._host()[0] - host_bytes
        self.host_peaks = [0, 0]  # until the engine has started, and since
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.end()
        if self._phase is None:
            self._host()  # resets its peak: loading the model is not counted
        self._phase = name
        if self._counting is not None:
            if name == self._counted_from:
                self._mode.enter_context(self._counting)
            self._counting.phases.append(name)
        torch.cuda.reset_peak_memory_stats()
        before = self._counts()
        yield
        after = self._counts()
        if name in ("encode", "forward"):  # later, gradients are moved, and the host reads whether to step
            self.reads += after["copies_to_host"] - before["copies_to_host"]
        self.launched[name] = self.launched.get(name, Launched(counts={})) + launched(before, after)

    def end(self) -> None:
        """End the current phase."""
        if self._phase is None:
            return
        old = self.phases.get(self._phase, PhaseBytes(peak_bytes=0, end_bytes=0))
        peak, end = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        self.phases[self._phase] = PhaseBytes(peak_bytes=max(old.peak_bytes, peak), end_bytes=max(old.end_bytes, end))
        self.reserved_bytes = max(self.reserved_bytes, torch.cuda.max_memory_reserved())
        started = self._phase != "init"
        self.host_peaks[started] = max(self.host_peaks[started], self._host()[1] - self._host_before)

    def started(self, engine: Engine, ema: Ema | None) -> _Watch:
        self.engine, self.ema = engine, ema
        return self

    @contextmanager
    def counting(self, counted: Counted) -> Iterator[None]:
        """Count the operators inside: all, those from UPDATE on, or none. It changes no allocation."""
        if counted == "nothing":
            yield
            return
        self._counting, self._counted_from = Counting(), UPDATE[0] if counted == "update" else None
        with ExitStack() as self._mode:
            if self._counted_from is None:
                self._mode.enter_context(self._counting)
            yield
        spans, costs = tuple(Span(phase, 0, 0) for phase in self._counting.phases), self._counting.costs
        self.packed_work = Timeline((), (), spans, costs.collectives(), costs.operators()).pack()


def recorded(request: StepRequest, built: Built, snapshot: str | None = None) -> Profile:
    """Two recorded steps on an empty GPU. torch's memory snapshot goes to the file `snapshot`.

    Raises UserError if that cannot be written, or if no memory is enough, and RuntimeError if the categories of a phase
    do not sum to torch's own peak.
    """
    began, strategy, device = time.perf_counter(), request.strategy, torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.cuda.init()
    importlib.import_module("bigdit_emulated.libraries").limit(UNLIMITED)
    history = History(stacks=snapshot is not None)
    marks, graphs = _Marks(Recorder(history)), CompiledGraphs(strategy)
    try:
        with unwritten_weights(), large_uncomputed():
            workload = prepare(request, built)
            watching = watching_fsdp2(marks.recorder) if strategy.engine == "fsdp2" else nullcontext()
            with group(strategy), marks.recorder, watching:
                for _ in itertools.islice(training(workload, device, marks), STEPS):
                    pass
                marks.watch.close()
                timeline, host_timeline = marks.recorder.timeline(), marks.recorder.host_timeline()
                saved = checkpoint_bytes(*marks.trained)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{request.model.name} fits no GPU: {str(error).partition('. GPU')[0]}") from None
    summed = ledger(timeline)
    _check(summed, timeline, history.peaks)
    if snapshot is not None:
        with replacing(Path(snapshot)) as temporary:
            temporary.write_bytes(pickle.dumps(history.snapshot, protocol=4))  # the newest that memory_viz reads
    return Profile(
        params=workload.params,
        ledger=summed,
        peak_reserved_bytes=history.peak_reserved_bytes,
        packed_timeline=timeline.pack(),
        packed_host_timeline=host_timeline.pack(),
        checkpoint_bytes=saved,
        versions=versions(),
        notices=(*notices(strategy, versions()), *graphs.breaks()),
        seconds=round(time.perf_counter() - began, 3),
    )


def notices(strategy: Strategy, versions: Mapping[str, str]) -> list[str]:
    """Lines for versions outside the tested range, and for optimizers that the engine makes larger."""
    found = untested(versions, {*PACKAGES.values()} - {PACKAGES.get(strategy.optimizer.name)})
    if strategy.zero_stage and strategy.optimizer.name in FACTORED:
        found.append(
            f"ZeRO-{strategy.zero_stage} hands {strategy.optimizer.name} flat partitions, which cannot be factored: "
            "its whole second moment is counted; strategy.engine fsdp2 keeps the factors"
        )
    return found


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
    """Marks storages for the recorder. `watch` and `trained` exist after `started`."""

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
