"""What was measured of the matrix beside what was predicted: gpu_matrix.md, and the receipts in gpu_matrix/."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigdit.bench.against_card import Reserved, against
from bigdit.bench.referee import lines
from bigdit.rehearse.card.client import Card
from pydantic import NonNegativeInt

from bigdit.files import write_json, write_text
from bigdit.profile.measured.run import CardRun, Spent, Timing
from bigdit.spec import Strict
from on_gpu.points import POINTS, Point
from on_gpu.predicted import PREDICTED, Peaks, Predicted, Predictions

_FULL = "CUDA out of memory"

DIFFERENT = """
## What differs, and why

- *HiDream* sends tokens to experts by what they hold: which expert has how many is not known without values. The
  rehearsal takes their shares as equal, and is 0.3 % off.
- *With the default allocator* (SD3-medium, PixArt with a moving average): cuDNN takes workspaces for convolutions that
  emulated cards take none for (155,263,123 bytes for PixArt's patches at 16 pictures, 27,525,120 for Sana's backward),
  and 256 bytes for attention forward, 512 more than ours backward. They are gone before any peak, but where blocks come
  to lie changes. With expandable segments that has moved no peak here. Since then emulated cards take PixArt's: it is
  copies of picture, weight and result with channels last, in eights of them, and 147 bytes. Run again with torch 2.11,
  PixArt reserves what it did on the card up to its second forward pass, but for 2 MiB in the first, where 6 MiB were
  missing; and SD3, of which no rule was made, in its first forward pass, where 6 MiB were missing too. After that
  addresses decide: PixArt's second backward pass reserves 144 MiB more than on the card (138 before), SD3's first 252
  MiB less (6 before), and its most is 26 MiB more than on the card, where 32 were missing.
- *Replayed*: what torch's allocator did on the card, replayed by ours from its own events, comes to the card's peaks
  to the byte, allocated and reserved, in all points but some of the default allocator, whose allocated peaks are up to
  2 MB off: equally good blocks are told apart by addresses, and a real card's do not rise.
- *HunyuanVideo*: 512 bytes of attention's workspace.
- *Rehearsed* with another version of torch than the card's: that version's rules are followed.

Gradients of Flux.1 and Chroma with LoRA were not finite on the card, and two blocks of Flux.1 with LoRA came to an
illegal memory access in the backward pass. What is wrong there is not found. Of the six points with adapters these
three, and they alone, have `torch.nn.RMSNorm` with frozen weights (SD3.5 and Qwen-Image have diffusers' own, in plain
operators, CogVideoX LayerNorm; Flux.2 and Wan trained theirs): the backward pass of torch 2.11's fused kernel, where
the weight wants no gradient, is the first to be tried alone on the next card.
With fp16 the first step overflows, as it does in training, and is not comparable.
"""

PAGE = Path(__file__).parents[1] / "gpu_matrix.md"
MEASURED = PREDICTED.with_name("measured.json")


class Measured(Strict):
    """What a point did on the card, or in a line why it did not end."""

    name: str
    failed: str | None = None
    device: str = ""
    phases: tuple[Peaks, ...] = ()
    beside_bytes: NonNegativeInt | None = None
    alloc_retries: NonNegativeInt = 0
    timing: Timing | None = None
    versions: dict[str, str] = {}


class Receipts(Strict):
    points: tuple[Measured, ...]


def report(outs: Sequence[Path]) -> None:
    """Add what lies in `outs` to the receipts, where what failed takes no place of another, and write the page anew."""
    kept = {each.name: each for each in measured()}
    for found in (_measured(point, out) for out in outs for point in POINTS):
        if found is not None and not (found.failed and found.name in kept):
            kept[found.name] = found
    predicted = Predictions.model_validate_json(PREDICTED.read_bytes())
    receipts = [kept[each.name] for each in predicted.points if each.name in kept]
    write_json(MEASURED, Receipts(points=tuple(receipts)).model_dump(mode="json", exclude_defaults=True))
    write_text(PAGE, page(predicted, kept))


def page(predicted: Predictions, taken: dict[str, Measured]) -> str:
    """The page of all points that were measured so far."""
    pairs = [(each, taken[each.name]) for each in predicted.points if each.name in taken]
    first = next(found for _, found in pairs if not found.failed)
    sides = {"in the open": [p for p in pairs if not p[0].held_out], "held out": [p for p in pairs if p[0].held_out]}
    parts = [
        "# Predicted, and then measured",
        "",
        "Made by `python benchmarks/gpu_matrix.py`. Every point was predicted first: *rehearsed* by "
        f"torch {predicted.versions['torch']} on a CPU, *emulated* by torch {predicted.cuda} without a GPU. Then two "
        f"steps of it ran on a real {first.device} with torch {first.versions['torch']}, in a fresh process. MiB are "
        "the most that torch reserved; *off* is prediction less measurement, of what was allocated and of what was "
        "reserved; *beside* is what the process took of the card beside torch. Seconds are of steps after those. Of "
        "Sana at 15 and 16 pictures a plan had said before which fits; their bytes were computed while others ran.",
        "",
        f"{len(pairs)} of {len(predicted.points)} points are measured. {_unmeasured(predicted, taken)}".rstrip(),
        "",
        *(line for title, some in sides.items() for line in _summary(title, some)),
    ]
    for title, some in sides.items():
        parts += ["", f"## Points {title}", "", *_table(some)]
    return "\n".join(parts) + "\n" + DIFFERENT


def _unmeasured(predicted: Predictions, taken: dict[str, Measured]) -> str:
    """The points of which the card has no measurement, by name."""
    names = [each.name for each in predicted.points if each.name not in taken]
    return f"No measurement is kept of {'; '.join(names)}." if names else ""


@dataclass(frozen=True)
class Errors:
    """How far the highest peaks of so many points are off, as shares of what was measured; `worst` has its sign."""

    compared: int
    exact: int
    median: float
    p95: float
    worst: float

    @property
    def said(self) -> str:
        off = f"median {self.median:.3%}, 95 % within {self.p95:.3%}, worst {self.worst:+.3%}"
        return f"{self.exact} to the byte, {off}"


def errors(pairs: Iterable[tuple[Predicted, Measured]], side: str, what: str) -> Errors | None:
    """Of what a `side` ("rehearsed", "emulated") says of bytes ("allocated", "reserved"); None where nothing compares.

    Points compare that fit the card, as predicted and as measured.
    """
    both = [(getattr(each, side), found.phases) for each, found in pairs if not found.failed]
    offs = [_off(ours, theirs, what) for ours, theirs in both if not isinstance(ours, str) and theirs]
    if not offs:
        return None
    sizes = [abs(off) for off in offs]
    exact, worst = sum(off == 0 for off in offs), max(offs, key=abs)
    return Errors(len(offs), exact, statistics.median(sizes), _percentile(sizes), worst)


def _summary(title: str, pairs: Sequence[tuple[Predicted, Measured]]) -> Iterable[str]:
    for side in ("rehearsed", "emulated"):
        ends = [(getattr(each, side), found) for each, found in pairs]
        ends = [(phases, found) for phases, found in ends if found.failed in (None, _FULL)]
        agree = [isinstance(phases, str) == (found.failed == _FULL) for phases, found in ends]
        allocated, reserved = errors(pairs, side, "allocated"), errors(pairs, side, "reserved")
        if allocated is None or reserved is None:
            continue
        verdicts = f"fits or not, as said: {sum(agree)} of {len(agree)}"
        said = f"allocated: {allocated.said}; reserved: {reserved.said}; {verdicts}"
        yield f"- {title}, {side}: {reserved.compared} compared; {said}"
    timed = [(each.step.seconds, found.timing.seconds_per_step) for each, found in pairs if each.step and found.timing]
    inside = sum(interval.low <= seconds <= interval.high for interval, seconds in timed)
    if timed:
        yield f"- {title}, seconds of a step: {inside} of {len(timed)} inside the interval"


def _table(pairs: Sequence[tuple[Predicted, Measured]]) -> Iterable[str]:
    heads = [
        "point",
        "emulated, MiB",
        "measured, MiB",
        "off, allocated",
        "off, reserved",
        "beside, MiB",
        "s, predicted",
    ]
    yield f"| {' | '.join([*heads, 's, measured'])} |"
    yield f"|{' --- |' * 8}"
    for each, found in pairs:
        yield f"| {' | '.join(_row(each, found))} |"


def _row(each: Predicted, found: Measured) -> list[str]:
    emulated = each.emulated if isinstance(each.emulated, str) else f"{_most(each.emulated, 'reserved') / 2**20:,.0f}"
    if found.failed:
        return [each.name, emulated, found.failed, "", "", "", "", ""]
    offs = ["", ""]
    if not isinstance(each.emulated, str):
        offs = [f"{_off(each.emulated, found.phases, what):+.3%}" for what in ("allocated", "reserved")]
    beside = "?" if found.beside_bytes is None else f"{found.beside_bytes / 2**20:,.0f}"
    seconds = "" if each.step is None else f"{each.step.seconds.low:.3f} to {each.step.seconds.high:.3f}"
    measured = "" if found.timing is None else f"{found.timing.seconds_per_step:.3f}"
    return [each.name, emulated, f"{_most(found.phases, 'reserved') / 2**20:,.0f}", *offs, beside, seconds, measured]


def _off(ours: Sequence[Peaks], theirs: Sequence[Peaks], what: str) -> float:
    return _most(ours, what) / _most(theirs, what) - 1


def _most(phases: Sequence[Peaks], what: str) -> int:
    return max(getattr(each, what) for each in phases)


def _percentile(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def _measured(point: Point, out: Path) -> Measured | None:
    answer, failed = (out / f"{point.key}.{kind}" for kind in ("json", "failed"))
    if answer.exists():
        run = CardRun.model_validate_json(answer.read_bytes())
        phases = tuple(
            Peaks(phase=each.phase, allocated=each.peak_allocated_bytes, reserved=each.peak_reserved_bytes)
            for each in run.phases
        )
        return Measured(
            name=point.name,
            device=run.device,
            phases=phases,
            beside_bytes=run.beside_bytes,
            alloc_retries=run.alloc_retries,
            timing=None if run.timing is None else _shortened(run.timing),
            versions=run.versions,
        )
    return Measured(name=point.name, failed=_why(failed.read_text())) if failed.exists() else None


def _why(said: str) -> str:
    """The one sentence that tells a reader why a process ended."""
    for sentence in (_FULL, "a step was not taken, since its gradients are not finite"):
        if sentence in said:
            return sentence
    return said


def _shortened(timing: Timing) -> Timing:
    """With the names of the kernels that took longest, and all others as one."""
    rows = sorted(timing.kernels.items(), key=lambda row: -row[1].seconds)
    kernels = {name[:80]: spent for name, spent in rows[:10]}
    rest = [spent for _, spent in rows[10:]]
    if rest:
        kernels["others"] = Spent(count=sum(each.count for each in rest), seconds=sum(each.seconds for each in rest))
    return timing.model_copy(update={"kernels": kernels})


def events(out: Path, part: str) -> None:
    """Print what the allocator did on both cards with the points that have `part` in their names: emulated (which is
    asked now, where it is not kept), then real, then their difference, and the blocks that only one of them has."""
    for point in (point for point in POINTS if part in point.name and (out / f"{point.key}.json").exists()):
        request, gpu = point.question()
        real = CardRun.model_validate_json((out / f"{point.key}.json").read_bytes())
        with Card(gpu, expandable_segments=point.expandable_segments) as card:
            emulated = card.run(request, timeout_s=300)
        counters = [
            Reserved(allocated_bytes=phase.peak_allocated_bytes, reserved_bytes=phase.peak_reserved_bytes)
            for phase in real.phases
        ]
        found = against(
            emulated.timeline,
            real.timeline,
            counters,
            gpu.usable_bytes,
            expandable_segments=point.expandable_segments,
        )
        print(point.name, *lines(found), sep="\n")


def measured() -> tuple[Measured, ...]:
    """All that was measured so far."""
    return Receipts.model_validate_json(MEASURED.read_bytes()).points if MEASURED.exists() else ()
