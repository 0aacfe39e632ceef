"""Memory against the micro-batch size: each point is rehearsed first, then run in a process of its own, until one runs
out of memory."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from bigdit.bench.against_card import by_replay
from bigdit.profile.measured.on_gpu import run_on_card
from bigdit.catalog import CatalogModel, Gpu
from bigdit.emulator import on_emulated_card
from bigdit.errors import UserError, versions
from bigdit.memory import Category, Timeline
from bigdit.memory.allocator import replay
from bigdit.memory.caching import fits
from bigdit.memory.process import ByteRange, beside_training
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.profile.request import request_for
from bigdit.rehearse.card.client import Card, build_with
from bigdit.profile.measured.run import CardRun, RanOut
from bigdit.rehearse.pool import Pool
from bigdit.spec import BatchShape, Strategy, Strict
from bigdit.units import gib

Device = Literal["measured", "emulated", "rehearsed"]
"""Where points run: on this machine's card, on one that is not there, or on none."""

Run = Callable[[StepRequest, int], CardRun]
"""Two steps, where torch may reserve so many bytes; 0: all."""


class PhasePeaks(Strict):
    """The most of a phase's occurrences; `allocated_bytes` counts whole blocks of the allocator."""

    phase: str
    allocated_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt


class Side(Strict):
    """Two steps by one device: their phases, or why they ran out of memory. `retries`: how often the allocator gave
    back what it kept, to find room."""

    phases: tuple[PhasePeaks, ...] = ()
    ran_out: str | None = None
    retries: NonNegativeInt = 0

    @property
    def fits(self) -> bool:
        return fits(self.ran_out is not None, self.retries)

    @property
    def deciding(self) -> PhasePeaks | None:
        """The phase with the highest peak; None where memory ran out."""
        return max(self.phases, key=lambda phase: phase.allocated_bytes, default=None)

    @property
    def allocated_bytes(self) -> int | None:
        return None if self.deciding is None else self.deciding.allocated_bytes

    @property
    def reserved_bytes(self) -> int | None:
        return max((phase.reserved_bytes for phase in self.phases), default=None)


class Point(Strict):
    """One micro-batch size: predicted by its rehearsal, and as it `ran`; None where it is rehearsed alone.

    `at_peak`: what was live at the rehearsed peak, by category. `process`: what nvidia-smi shows, of what decides; None
    where memory ran out. `seconds_per_step` is a real card's.
    """

    micro_batch_size: PositiveInt
    rehearsed: Side
    at_peak: dict[Category, NonNegativeInt]
    ran: Side | None
    process: ByteRange | None
    seconds_per_step: PositiveFloat | None = None

    @property
    def decides(self) -> Side:
        """What ran, where it did."""
        return self.rehearsed if self.ran is None else self.ran

    @property
    def fits(self) -> bool:
        return self.decides.fits

    @property
    def samples_per_second(self) -> float | None:
        return None if self.seconds_per_step is None else self.micro_batch_size / self.seconds_per_step


class Curve(Strict):
    """One strategy, as it was asked for; `left_out`: sizes above the one that ran out of memory."""

    asked: str
    strategy: Strategy
    points: tuple[Point, ...]
    left_out: tuple[PositiveInt, ...]

    @property
    def largest(self) -> int | None:
        """The largest of the sizes that fits; None where none does."""
        return max((point.micro_batch_size for point in self.points if point.fits), default=None)


class MemoryBench(Strict):
    """The curves of a model on a card. `build`: of the torch that ran, with its allocator; None where none did. Of
    `versions` torch's is the one that ran."""

    written: datetime.date = Field(default_factory=datetime.date.today)
    model: str
    params: PositiveInt
    gpu: Gpu
    device: Device
    limited: bool
    expandable_segments: bool
    batch: BatchShape
    curves: tuple[Curve, ...]
    build: str | None
    versions: dict[str, str]


class MemoryBenchmark:
    """What is asked of every point alike. `limit_bytes` caps the process, so that a card stands in for a smaller one;
    `steps` are timed on a real card. `said` is told of each point before it is looked at."""

    def __init__(
        self,
        model: CatalogModel,
        gpu: Gpu,
        device: Device,
        *,
        resolution: int | tuple[int, int] | None = None,
        frames: int | None = None,
        limit_bytes: int | None = None,
        expandable_segments: bool = True,
        steps: int = 5,
        said: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._model = model
        self._gpu = gpu if limit_bytes is None else gpu.model_copy(update={"usable_mib": limit_bytes >> 20})
        self._device = device
        self._resolution, self._frames = resolution, frames
        self._limited = limit_bytes is not None
        self._expandable_segments = expandable_segments
        self._steps = steps
        self._said = said

    def curves(self, strategies: Sequence[tuple[str, Strategy]], sizes: Sequence[int]) -> MemoryBench:
        """Every strategy, by the name it was asked for, at the sizes from the smallest on until one runs out.

        Raises UserError for what cannot be rehearsed or run.
        """
        if self._device == "measured":
            self._check_alone(strategies)
        asked = [
            (name, strategy, [self._request(strategy, size) for size in sorted(sizes)]) for name, strategy in strategies
        ]  # all of them before any is looked at, so that what cannot be asked is said at once
        with ExitStack() as ends:
            pool = ends.enter_context(Pool())
            run = self._runner(ends)
            found = [self._curve(pool, run, *each) for each in asked]
        points = [answer for _, answers in found for answer in answers]
        build = build_with(self._expandable_segments) if self._device == "emulated" else None
        return MemoryBench(
            model=self._model.name,
            params=points[0].params,
            gpu=self._gpu,
            device="emulated" if self._device == "measured" and on_emulated_card() else self._device,
            limited=self._limited,
            expandable_segments=self._expandable_segments,
            batch=asked[0][2][0].batch,
            curves=tuple(curve for curve, _ in found),
            build=build,
            versions=versions() | ({} if build is None else {"torch": build.split()[0]}),
        )

    def _check_alone(self, strategies: Sequence[tuple[str, Strategy]]) -> None:
        wrong = [
            f"--strategy {name} has {strategy.world_size} processes, and on this machine's card one is measured; name "
            "the card with --gpu for an emulated one, on which the first of them runs"
            for name, strategy in strategies
            if strategy.world_size > 1
        ]
        if wrong:
            raise UserError(*wrong)

    def _request(self, strategy: Strategy, size: int) -> StepRequest:
        of_size = strategy.with_micro_batch_size(size)
        return request_for(self._model, self._gpu, of_size, resolution=self._resolution, frames=self._frames)

    def _runner(self, ends: ExitStack) -> Run | None:
        expandable = self._expandable_segments
        if self._device == "emulated":  # which has the limit's bytes itself
            card = ends.enter_context(Card(self._gpu, expandable_segments=expandable))
            return lambda request, capacity_bytes: card.run(request)
        if self._device == "measured":
            steps = 0 if on_emulated_card() else self._steps
            return partial(run_on_card, steps=steps, expandable_segments=expandable)
        return None

    def _curve(
        self, pool: Pool, run: Run | None, name: str, strategy: Strategy, requests: Sequence[StepRequest]
    ) -> tuple[Curve, list[RehearsedSize]]:
        self._said(f"{name}: rehearsing {len(requests)} micro-batch sizes")
        answers, points = [], []
        for answer in pool.rehearse(requests):
            if isinstance(answer, UserError):
                raise answer
            answers.append(answer)
        for request, answer in zip(requests, answers, strict=True):
            self._said(f"{name}: micro-batch {request.micro_batch_sizes[0]}")
            points.append(self._point(run, request, answer))
            if points[-1].decides.ran_out is not None:
                break
        left_out = tuple(request.micro_batch_sizes[0] for request in requests[len(points) :])
        return Curve(asked=name, strategy=strategy, points=tuple(points), left_out=left_out), answers

    def _point(self, run: Run | None, request: StepRequest, answer: RehearsedSize) -> Point:
        gpu, timeline = self._gpu, answer.timeline
        beside = beside_training(request.strategy, gpu.compute_capability, gpu.multiprocessors)
        capacity = max(gpu.usable_bytes - beside.high_bytes, 1)
        rehearsed, found = self._replayed(timeline, capacity), None
        decides, ran = rehearsed, None
        if run is not None:
            try:
                found = run(request, capacity if self._limited else 0)
                peaks = ((each.phase, each.peak_allocated_bytes, each.peak_reserved_bytes) for each in found.phases)
                ran = _side(peaks, found.alloc_retries)
            except RanOut as error:
                ran = Side(ran_out=str(error))
            decides = ran
        if found is not None and found.beside_bytes is not None and self._device == "measured":
            beside = ByteRange(low_bytes=found.beside_bytes, high_bytes=found.beside_bytes)
        reserved = decides.reserved_bytes
        return Point(
            micro_batch_size=request.micro_batch_sizes[0],
            rehearsed=rehearsed,
            at_peak=answer.ledger.at_peak,
            ran=ran,
            process=None if reserved is None else ByteRange(low_bytes=reserved, high_bytes=reserved) + beside,
            seconds_per_step=None if found is None or found.timing is None else found.timing.seconds_per_step,
        )

    def _replayed(self, timeline: Timeline, capacity_bytes: int) -> Side:
        whole = replay(timeline, capacity_bytes, expandable_segments=self._expandable_segments)
        if not whole.fits:
            return Side(ran_out=f"the replay of torch's allocator found no room in {gib(capacity_bytes)}")
        peaks = by_replay(timeline, capacity_bytes, expandable_segments=self._expandable_segments)
        occurrences = (
            (span.phase, peak.allocated_bytes, peak.reserved_bytes)
            for span, peak in zip(timeline.spans, peaks, strict=True)
        )
        return _side(occurrences, whole.cache_flushes)


def _side(occurrences: Iterable[tuple[str, int, int]], retries: int) -> Side:
    """Of each phase's occurrences, by its name, the most that was allocated and that was reserved."""
    found: dict[str, tuple[int, int]] = {}
    for phase, allocated, reserved in occurrences:
        before = found.get(phase, (0, 0))
        found[phase] = max(before[0], allocated), max(before[1], reserved)
    phases = (PhasePeaks(phase=phase, allocated_bytes=most[0], reserved_bytes=most[1]) for phase, most in found.items())
    return Side(phases=tuple(phases), retries=retries)
