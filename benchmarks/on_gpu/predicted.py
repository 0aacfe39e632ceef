"""What the matrix's points are predicted to do: by the rehearsal, and by the emulated card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bigdit.bench.against_card import by_replay
from bigdit.memory.caching import OutOfMemory
from bigdit.rehearse.card.client import Card, cuda_build, cuda_python
from bigdit.rehearse.pool import Pool
from pydantic import NonNegativeInt

from bigdit import catalog
from bigdit.errors import UserError, versions
from bigdit.files import write_json
from bigdit.memory import Timeline
from bigdit.memory.process import cuda_context
from bigdit.profile.lanes import WorkerError
from bigdit.profile.measured.run import RanOut
from bigdit.spec import Strict
from bigdit.speed.cluster import Cluster
from bigdit.speed.seconds import StepTime
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of
from on_gpu.points import GPU, Point

PREDICTED = Path(__file__).with_suffix(".json")


class Peaks(Strict):
    """One occurrence of a phase: bytes in whole blocks of the allocator, and reserved, at their peaks."""

    phase: str
    allocated: NonNegativeInt
    reserved: NonNegativeInt


class Predicted(Strict):
    """A point's phases on both devices, or in a line why there are none, and seconds of a step."""

    name: str
    held_out: bool
    rehearsed: tuple[Peaks, ...] | str
    emulated: tuple[Peaks, ...] | str
    step: StepTime | None


class Predictions(Strict):
    """Of every point of the matrix; `versions` rehearsed, `cuda` is the build of torch on the emulated card."""

    gpu: str
    versions: dict[str, str]
    cuda: str
    points: tuple[Predicted, ...]


def predict(points: Sequence[Point]) -> None:
    """Ask both devices about all points."""
    gpu = catalog.resolve_gpu(GPU)
    with Pool(1, timeout_s=300) as pool, Card(gpu) as whole, Card(gpu, expandable_segments=True) as expandable:
        found = []
        for point in points:
            card = expandable if point.expandable_segments else whole
            found.append(_predicted(point, card, pool))
            print(_line(found[-1]), flush=True)
    every = Predictions(gpu=GPU, versions=versions(), cuda=cuda_build(cuda_python()), points=tuple(found))
    PREDICTED.parent.mkdir(exist_ok=True)
    write_json(PREDICTED, every.model_dump(mode="json"))


def _predicted(point: Point, card: Card, pool: Pool) -> Predicted:
    request, gpu = point.question()
    found: tuple[Peaks, ...] | str
    (answer,) = pool.rehearse([request])
    step = None
    if isinstance(answer, UserError):
        found = str(answer)
    else:
        cluster = Cluster(gpus=1, gpus_per_node=1)
        step = step_time(work_of(answer.timeline, request.strategy), request.strategy, gpu, cluster)
        try:
            found = rehearsed(answer.timeline, point, gpu)
        except OutOfMemory as error:
            found = f"out of memory: {error}"
    return Predicted(
        name=point.name, held_out=point.held_out, rehearsed=found, emulated=_emulated(card, point), step=step
    )


def rehearsed(timeline: Timeline, point: Point, gpu: catalog.Gpu) -> tuple[Peaks, ...]:
    """A rehearsal's phases on the card, with the point's allocator. Raises OutOfMemory."""
    replayed = by_replay(timeline, _capacity(gpu), expandable_segments=point.expandable_segments)
    return tuple(
        Peaks(phase=span.phase, allocated=peak.allocated_bytes, reserved=peak.reserved_bytes)
        for span, peak in zip(timeline.spans, replayed, strict=True)
    )


def _emulated(card: Card, point: Point) -> tuple[Peaks, ...] | str:
    try:
        run = card.run(point.question()[0], timeout_s=300)
    except RanOut:
        return "out of memory"
    except (UserError, WorkerError) as error:
        return str(error)
    return tuple(
        Peaks(phase=each.phase, allocated=each.peak_allocated_bytes, reserved=each.peak_reserved_bytes)
        for each in run.phases
    )


def _capacity(gpu: catalog.Gpu) -> int:
    return gpu.usable_bytes - cuda_context(gpu.compute_capability, gpu.multiprocessors).high_bytes


def _line(found: Predicted) -> str:
    sides = [
        side if isinstance(side, str) else f"{max(each.reserved for each in side):,}"
        for side in (found.rehearsed, found.emulated)
    ]
    seconds = "" if found.step is None else f"{found.step.seconds.low:.3f} to {found.step.seconds.high:.3f} s"
    return f"{found.name}: {' | '.join(sides)} | {seconds}"
