"""Predict the matrix's points on an emulated GPU: peaks, and seconds of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from emulated import step_of
from pydantic import NonNegativeInt

from bigdit import catalog
from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.errors import UserError
from bigdit.files import write_json
from bigdit.memory.process import non_torch_memory_of
from bigdit.profile.attempt import Attempt
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.pool import WorkerError
from bigdit.speed.seconds import Cluster, StepTime
from bigdit.strategy import Strict
from on_gpu.points import GPU, Point

PREDICTED = Path(__file__).with_suffix(".json")
REPLAYED = PREDICTED.with_name("replayed.json")


class Peaks(Strict):
    """The most bytes that torch allocated, in whole blocks of its allocator, and reserved."""

    allocated: NonNegativeInt
    reserved: NonNegativeInt


class Predicted(Strict):
    """A point's peaks, or why there are none, in a line; and seconds of a step."""

    name: str
    held_out: bool
    emulated: Peaks | str
    step: StepTime | None


class Predictions(Strict):
    """`cuda`: the build of torch that ran."""

    gpu: str
    cuda: str
    points: tuple[Predicted, ...]


def predict(points: Sequence[Point], path: Path, known: Sequence[Predicted] = ()) -> None:
    """Run points on the emulated GPU, print a line for each, and write `path`. Points in `known` stay."""
    found = {each.name: each for each in known}
    missing = [point for point in points if point.name not in found]
    for each in _predicted(missing) if missing else ():
        found[each.name] = each
        peaks = each.emulated if isinstance(each.emulated, str) else f"{each.emulated.reserved:,} bytes reserved"
        seconds = "" if each.step is None else f", {each.step.seconds.low:.3f} to {each.step.seconds.high:.3f} s"
        print(f"{each.name}: {peaks}{seconds}", flush=True)
        ordered = tuple(found[point.name] for point in points if point.name in found)
        every = Predictions(gpu=GPU, cuda=cuda_build(cuda_python()), points=ordered)
        write_json(path, every.model_dump(mode="json"))  # after each: one with compiled blocks takes minutes


def _predicted(points: Sequence[Point]) -> Iterator[Predicted]:
    gpu = catalog.resolve_gpu(GPU)
    with EmulatedGpus(gpu, 1) as expandable, EmulatedGpus(gpu, 1, expandable_segments=False) as default:
        for point in points:
            yield predicted(point, expandable if point.expandable_segments else default)


def predicted(point: Point, cards: EmulatedGpus) -> Predicted:
    """Run the point within the GPU's memory."""
    request, gpu = point.asked()
    strategy = request.strategy
    capacity = gpu.usable_bytes - non_torch_memory_of(strategy, gpu).high_bytes
    found: Attempt | str
    try:
        found = cards.attempt(request, capacity, counted="step")
    except (UserError, WorkerError) as error:
        found = str(error)
    if isinstance(found, str) or not found.ran:
        emulated = found if isinstance(found, str) else "out of memory"
        return Predicted(name=point.name, held_out=point.held_out, emulated=emulated, step=None)
    return Predicted(
        name=point.name,
        held_out=point.held_out,
        emulated=Peaks(allocated=found.peak_allocated_bytes, reserved=found.peak_reserved_bytes),
        step=step_of(found, strategy, gpu, Cluster(gpus=1, gpus_per_node=1)),
    )
