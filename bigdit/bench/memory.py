"""Memory against the micro-batch size: emulated at each size, and measured on this machine's GPU."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from bigdit.catalog import CatalogModel, Gpu
from bigdit.emulator import on_emulated_gpu
from bigdit.errors import UserError, versions
from bigdit.memory import Category
from bigdit.memory.process import ByteRange, non_torch_memory_of
from bigdit.profile.attempt import Attempt, StepRequest, request_for
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.measured import GpuRun, RanOut, run_on_gpu
from bigdit.strategy import BatchShape, Strategy, Strict


class Peaks(Strict):
    """Two steps on one GPU: allocated bytes by phase and reserved bytes, or the out-of-memory message."""

    phases: dict[str, NonNegativeInt] = Field(default_factory=dict)
    reserved_bytes: NonNegativeInt = 0
    ran_out: str | None = None
    retries: NonNegativeInt = 0

    @property
    def fits(self) -> bool:
        """Whether it ran without retries of the allocator."""
        return self.ran_out is None and not self.retries

    @property
    def allocated_bytes(self) -> int:
        return max(self.phases.values(), default=0)

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak. Raises ValueError where memory ran out."""
        return max(self.phases, key=self.phases.__getitem__)


class Point(Strict):
    """One micro-batch size: emulated, and as it `ran` on this machine's GPU; None for another GPU.

    `process`: as in nvidia-smi; None where memory ran out. `seconds_per_step`: on a real GPU.
    """

    micro_batch_size: PositiveInt
    emulated: Peaks
    ran: Peaks | None
    process: ByteRange | None
    seconds_per_step: PositiveFloat | None = None

    @property
    def peaks(self) -> Peaks:
        """The measured peaks if there are any, else the emulated ones."""
        return self.emulated if self.ran is None else self.ran

    @property
    def samples_per_second(self) -> float | None:
        return None if self.seconds_per_step is None else self.micro_batch_size / self.seconds_per_step


class Curve(Strict):
    """One strategy. `left_out`: sizes above the one that ran out of memory.

    `at_peak`: emulated bytes by category at the peak of the largest size that fits.
    """

    asked: str
    strategy: Strategy
    points: tuple[Point, ...]
    left_out: tuple[PositiveInt, ...]
    at_peak: dict[Category, NonNegativeInt]

    @property
    def largest(self) -> int | None:
        """The largest size that fits; None if none does."""
        return max((point.micro_batch_size for point in self.points if point.peaks.fits), default=None)


class MemoryBench(Strict):
    """The curves of a model on a GPU. `build`: of the emulated GPU's torch; `versions` has the torch of the results."""

    written: datetime.date = Field(default_factory=datetime.date.today)
    model: str
    params: PositiveInt
    gpu: Gpu
    grade: Literal["measured", "emulated"]
    limited: bool
    expandable_segments: bool
    batch: BatchShape
    curves: tuple[Curve, ...]
    build: str
    versions: dict[str, str]


@dataclass(frozen=True)
class MemoryBenchmark:
    """The settings of all points.

    `own`: they also run on this machine's GPU, with `steps` timed if it is real. `limit_bytes`: limits the process, as
    on a smaller GPU. `progress` is called before each point.
    """

    model: CatalogModel
    gpu: Gpu
    own: bool
    resolution: int | tuple[int, int] | None
    frames: int | None
    limit_bytes: int | None
    expandable_segments: bool
    steps: int
    progress: Callable[[str], None]

    @property
    def _gpu(self) -> Gpu:
        usable = {} if self.limit_bytes is None else {"usable_mib": self.limit_bytes >> 20}
        return self.gpu.model_copy(update=usable)

    @property
    def _real(self) -> bool:
        return self.own and not on_emulated_gpu()

    def curves(self, strategies: Sequence[tuple[str, Strategy]], sizes: Sequence[int]) -> MemoryBench:
        """The curve of each strategy, from the smallest size until memory runs out. Raises UserError for what cannot
        run."""
        wrong = [
            f"--strategy {name} has {strategy.world_size} processes, and --gpu auto measures one; name a GPU with "
            "--gpu, and the first process runs on an emulated one"
            for name, strategy in strategies
            if self.own and strategy.world_size > 1
        ]
        if wrong:
            raise UserError(*wrong)
        asked = [
            (name, strategy, [self._request(strategy, size) for size in sorted(sizes)]) for name, strategy in strategies
        ]  # first: what cannot run is an error at once
        with EmulatedGpus(self._gpu, 1, expandable_segments=self.expandable_segments) as runner:
            params = runner.attempt(asked[0][2][0], self._capacity(asked[0][1])).params
            found = tuple(self._curve(runner, *each) for each in asked)
        return MemoryBench(
            model=self.model.name,
            params=params,
            gpu=self._gpu,
            grade="measured" if self._real else "emulated",
            limited=self.limit_bytes is not None,
            expandable_segments=self.expandable_segments,
            batch=asked[0][2][0].batch,
            curves=found,
            build=runner.build,
            versions=versions() | ({} if self._real else {"torch": runner.build.split()[0]}),
        )

    def _request(self, strategy: Strategy, size: int) -> StepRequest:
        of_size = strategy.with_micro_batch_size(size)
        return request_for(self.model, self._gpu, of_size, resolution=self.resolution, frames=self.frames)

    def _non_torch(self, strategy: Strategy) -> ByteRange:
        return non_torch_memory_of(strategy, self._gpu)

    def _capacity(self, strategy: Strategy) -> int:
        return max(self._gpu.usable_bytes - self._non_torch(strategy).high_bytes, 1)

    def _curve(self, runner: EmulatedGpus, name: str, strategy: Strategy, requests: Sequence[StepRequest]) -> Curve:
        points: list[Point] = []
        largest = None
        for request in requests:
            self.progress(f"{name}: micro-batch {request.strategy.micro_batch_size}")
            points.append(self._point(runner, request))
            peaks = points[-1].peaks
            largest = request if peaks.fits else largest
            if peaks.ran_out is not None:
                break
        return Curve(
            asked=name,
            strategy=strategy,
            points=tuple(points),
            left_out=tuple(request.strategy.micro_batch_size for request in requests[len(points) :]),
            at_peak={} if largest is None else runner.profile(largest).ledger.at_peak,
        )

    def _point(self, runner: EmulatedGpus, request: StepRequest) -> Point:
        capacity, non_torch = self._capacity(request.strategy), self._non_torch(request.strategy)
        emulated, ran, run = _emulated(runner.attempt(request, capacity)), None, None
        if self.own:
            limit, steps = (0 if self.limit_bytes is None else capacity), (self.steps if self._real else 0)
            try:
                run = run_on_gpu(request, limit, steps, self.expandable_segments)
                ran = _measured(run)
            except RanOut as error:
                ran = Peaks(ran_out=str(error))
        if self._real and run is not None and run.non_torch_bytes is not None:
            non_torch = _exactly(run.non_torch_bytes)
        peaks = ran or emulated
        return Point(
            micro_batch_size=request.strategy.micro_batch_size,
            emulated=emulated,
            ran=ran,
            process=None if peaks.ran_out is not None else _exactly(peaks.reserved_bytes) + non_torch,
            seconds_per_step=None if run is None or run.timing is None else run.timing.seconds_per_step,
        )


def _exactly(nbytes: int) -> ByteRange:
    return ByteRange(low_bytes=nbytes, high_bytes=nbytes)


def _emulated(attempt: Attempt) -> Peaks:
    if attempt.out_of_memory is not None:
        return Peaks(ran_out=attempt.out_of_memory.partition(" If reserved")[0])  # hints follow
    return Peaks(phases=attempt.peaks, reserved_bytes=attempt.peak_reserved_bytes, retries=attempt.retries)


def _measured(run: GpuRun) -> Peaks:
    phases = {each.phase: each.allocated_bytes for each in run.phases}
    reserved = max(each.reserved_bytes or 0 for each in run.phases)
    return Peaks(phases=phases, reserved_bytes=reserved, retries=run.alloc_retries)
