"""Write gpu_matrix.md from the JSON files in this folder: what was measured, and what was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pages import kept
from pydantic import NonNegativeInt

from bigdit.files import write_json, write_text
from bigdit.profile.measured import GpuRun, Timing
from bigdit.strategy import Strict
from bigdit.units import MIB
from on_gpu.points import POINTS, Point
from on_gpu.predicted import PREDICTED, REPLAYED, Peaks, Predicted, Predictions

_FULL = "CUDA out of memory"

PAGE = Path(__file__).parents[1] / "gpu_matrix.md"
MEASURED = PREDICTED.with_name("measured.json")


class Phase(Peaks):
    """One occurrence of a phase."""

    phase: str


class Measured(Strict):
    """What a point took of the GPU, or why it did not end, in a line."""

    name: str
    failed: str | None = None
    device: str = ""
    phases: tuple[Phase, ...] = ()
    non_torch_bytes: NonNegativeInt | None = None
    alloc_retries: NonNegativeInt = 0
    timing: Timing | None = None
    versions: dict[str, str] = {}

    @property
    def peaks(self) -> Peaks:
        """The peaks of all phases."""
        most = {what: max(getattr(each, what) for each in self.phases) for what in ("allocated", "reserved")}
        return Peaks(**most)


class Receipts(Strict):
    points: tuple[Measured, ...]


def report(outs: Sequence[Path]) -> None:
    """Add the results in `outs` to the receipts, and write the page. A failure replaces no receipt."""
    kept = {each.name: each for each in measured()}
    for found in (_measured(point, out) for out in outs for point in POINTS):
        if found is not None and not (found.failed and found.name in kept):
            kept[found.name] = found
    predicted = Predictions.model_validate_json(PREDICTED.read_bytes())
    receipts = [kept[each.name] for each in predicted.points if each.name in kept]
    write_json(MEASURED, Receipts(points=tuple(receipts)).model_dump(mode="json", exclude_defaults=True))
    write_text(PAGE, page(predicted, replayed(), kept))


def page(predicted: Predictions, again: Predictions, taken: dict[str, Measured]) -> str:
    """The page of all points measured so far, with today's replay."""
    pairs = beside(predicted, taken)
    first = next(found for _, found in pairs if not found.failed)
    sides = {"in the open": [p for p in pairs if not p[0].held_out], "held out": [p for p in pairs if p[0].held_out]}
    parts = [
        "# Predicted, and then measured",
        "",
        "Made by `python benchmarks/gpu_matrix.py`. Every point was predicted first, on an emulated GPU by torch "
        f"{predicted.cuda}. Then two steps of it ran on a real {first.device} with torch {first.versions['torch']}, in "
        "a fresh process. MiB are the most that torch reserved. *Off* is prediction less measurement, for allocated "
        "and for reserved bytes. *Non-torch* is what the process took of the GPU beside torch. Seconds are of the "
        "steps after those two. Of Sana at 15 and 16 images a plan had said before which fits; their bytes were "
        "computed while others ran.",
        "",
        f"{len(pairs)} of {len(predicted.points)} points are measured. {_unmeasured(predicted, taken)}".rstrip(),
        "",
        *(line for title, some in sides.items() for line in _summary(title, some)),
        *_summary(f"all replayed today by torch {again.cuda}", beside(again, taken)),
    ]
    for title, some in sides.items():
        parts += ["", f"## Points {title}", "", *_table(some)]
    return "\n".join([*parts, "", kept(PAGE, "## What differs, and why")])


def replayed() -> Predictions:
    """The answers of today's emulated GPU for all points."""
    return Predictions.model_validate_json(REPLAYED.read_bytes())


def beside(predicted: Predictions, taken: dict[str, Measured]) -> list[tuple[Predicted, Measured]]:
    """A row for each measured point, with its prediction."""
    return [(each, taken[each.name]) for each in predicted.points if each.name in taken]


def _unmeasured(predicted: Predictions, taken: dict[str, Measured]) -> str:
    """Names of points that were not measured."""
    names = [each.name for each in predicted.points if each.name not in taken]
    return f"No measurement is kept of {'; '.join(names)}." if names else ""


@dataclass(frozen=True)
class Errors:
    """How far the highest peaks of several points are off, as shares of what was measured. `worst` has a sign."""

    compared: int
    exact: int
    median: float
    p95: float
    worst: float

    @property
    def said(self) -> str:
        off = f"median {self.median:.3%}, 95 % within {self.p95:.3%}, worst {self.worst:+.3%}"
        return f"{self.exact} to the byte, {off}"


def errors(pairs: Iterable[tuple[Predicted, Measured]], what: str) -> Errors | None:
    """How far "allocated" or "reserved" bytes are off, or None if nothing compares. A point compares if it fits the
    GPU, as predicted and as measured."""
    both = [(each.emulated, found) for each, found in pairs if found.phases]
    offs = [_off(ours, found, what) for ours, found in both if not isinstance(ours, str)]
    if not offs:
        return None
    sizes = [abs(off) for off in offs]
    exact, worst = sum(off == 0 for off in offs), max(offs, key=abs)
    return Errors(len(offs), exact, statistics.median(sizes), _percentile(sizes), worst)


def _summary(title: str, pairs: Sequence[tuple[Predicted, Measured]]) -> Iterable[str]:
    ends = [(each.emulated, found) for each, found in pairs if found.failed in (None, _FULL)]
    agree = [isinstance(emulated, str) == (found.failed == _FULL) for emulated, found in ends]
    allocated, reserved = errors(pairs, "allocated"), errors(pairs, "reserved")
    if allocated is None or reserved is None:
        return
    verdicts = f"fits or not, as said: {sum(agree)} of {len(agree)}"
    said = f"allocated: {allocated.said}; reserved: {reserved.said}; {verdicts}"
    yield f"- {title}: {reserved.compared} compared; {said}"
    timed = [(each.step.seconds, found.timing.seconds_per_step) for each, found in pairs if each.step and found.timing]
    inside = sum(interval.low <= seconds <= interval.high for interval, seconds in timed)
    if timed:
        yield f"- {title}, seconds of a step: {inside} of {len(timed)} inside the interval"


def _table(pairs: Sequence[tuple[Predicted, Measured]]) -> Iterable[str]:
    heads = ["point", "emulated, MiB", "measured, MiB", "off, allocated", "off, reserved", "non-torch, MiB"]
    yield f"| {' | '.join([*heads, 's, predicted', 's, measured'])} |"
    yield f"|{' --- |' * 8}"
    for each, found in pairs:
        yield f"| {' | '.join(_row(each, found))} |"


def _row(each: Predicted, found: Measured) -> list[str]:
    emulated = each.emulated if isinstance(each.emulated, str) else f"{each.emulated.reserved / MIB:,.0f}"
    if found.failed:
        return [each.name, emulated, found.failed, "", "", "", "", ""]
    offs = ["", ""]
    if not isinstance(each.emulated, str):
        offs = [f"{_off(each.emulated, found, what):+.3%}" for what in ("allocated", "reserved")]
    beside = "?" if found.non_torch_bytes is None else f"{found.non_torch_bytes / MIB:,.0f}"
    seconds = "" if each.step is None else f"{each.step.seconds.low:.3f} to {each.step.seconds.high:.3f}"
    measured = "" if found.timing is None else f"{found.timing.seconds_per_step:.3f}"
    return [each.name, emulated, f"{found.peaks.reserved / MIB:,.0f}", *offs, beside, seconds, measured]


def _off(ours: Peaks, theirs: Measured, what: str) -> float:
    return float(getattr(ours, what) / getattr(theirs.peaks, what) - 1)


def _percentile(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def _measured(point: Point, out: Path) -> Measured | None:
    answer, failed = (out / f"{point.key}.{kind}" for kind in ("json", "failed"))
    if answer.exists():
        run = GpuRun.model_validate_json(answer.read_bytes())
        phases = tuple(
            Phase(phase=each.phase, allocated=each.allocated_bytes, reserved=each.reserved_bytes or 0)
            for each in run.phases
        )
        return Measured(
            name=point.name,
            device=run.device,
            phases=phases,
            non_torch_bytes=run.non_torch_bytes,
            alloc_retries=run.alloc_retries,
            timing=None if run.timing is None else _shortened(run.timing),
            versions=run.versions,
        )
    return Measured(name=point.name, failed=_why(failed.read_text())) if failed.exists() else None


def _why(said: str) -> str:
    """The sentence of an output that says why a process ended."""
    for sentence in (_FULL, "a step was not taken, since its gradients are not finite"):
        if sentence in said:
            return sentence
    return said


def _shortened(timing: Timing) -> Timing:
    """The result with only the kernels that took longest."""
    rows = sorted(timing.kernels.items(), key=lambda row: -row[1].seconds)[:10]
    return timing.model_copy(update={"kernels": {name[:80]: spent for name, spent in rows}})


def measured() -> tuple[Measured, ...]:
    """All that was measured so far."""
    return Receipts.model_validate_json(MEASURED.read_bytes()).points if MEASURED.exists() else ()
