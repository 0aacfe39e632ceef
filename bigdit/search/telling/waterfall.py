"""What each change from the copied setting to the recommended one leaves of the card's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bigdit.errors import UserError
from bigdit.memory import Timeline
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import UNLIMITED
from bigdit.rehearse import RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import Candidate, beside
from bigdit.profile.cards import NO_CARDS, Device
from bigdit.search.finding.confirm import Confirmed, recorded_part
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.verdict import expected, process
from bigdit.search.plan import Step
from bigdit.search.predict.anchors import Sample, grid, outline, requests
from bigdit.search.question import Question
from bigdit.search.telling.changes import Change, changes
from bigdit.spec import Strategy
from bigdit.units import GIB, gib

ROOM = 1024 * GIB
"""Bytes of a card on which any step comes to its end, and says what it wants."""
WORTH_SAYING = 0.005
"""Of the bytes before: smaller effects are called nothing."""


@dataclass(frozen=True)
class Bar:
    """Allocated bytes by phase; what torch reserves beyond their peak; bytes of encoders; and what torch reserved,
    where it ran on a card."""

    peaks: Mapping[str, float]
    idle_bytes: float
    encoder_bytes: int = 0
    ran_bytes: int | None = None

    @property
    def phase(self) -> str:
        """The phase that decides."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def reserved_bytes(self) -> int:
        return round(max(self.peaks.values()) + self.idle_bytes) if self.ran_bytes is None else self.ran_bytes


def waterfall(
    pool: Pool,
    sample: Sample,
    question: Question,
    evidence: Evidence,
    chosen: Confirmed,
    device: Device = NO_CARDS,
) -> tuple[Step, ...]:
    """The bars from the naive setting to `chosen`.

    All run on the device where it has cards, as large as they must be. Without, all that comes before recomputation and
    the recommended micro-batch is rehearsed with shallow siblings, at the naive micro-batch itself; those two are the
    search's predictions. The last bar is `chosen` as it was confirmed; which phase decides is said by siblings.
    Raises UserError where a sibling cannot be rehearsed.
    """
    steps = changes(sample, question, chosen.candidate)
    found = _run(device, sample, steps, bars(pool, sample, chosen.candidate, steps))
    found[-1] = replace(found[-1], ran_bytes=chosen.reserved_bytes)
    shown = []
    for at, (change, bar) in enumerate(zip(steps, found, strict=True)):
        taken = process(bar.reserved_bytes, beside(question, change.strategy), evidence.band)
        shown.append(
            Step(
                change=change.title,
                process_bytes=taken.high_bytes,
                verdict=expected(taken, question.gpu.usable_bytes),
                saved_by=said(change, found[at - 1] if at else None, bar),
                predicted=bar.ran_bytes is None,
            )
        )
    confirmed = {"process_bytes": chosen.process.high_bytes, "verdict": chosen.verdict}
    return (*shown[:-1], shown[-1].model_copy(update=confirmed))


def bars(pool: Pool, sample: Sample, chosen: Candidate, steps: Sequence[Change]) -> list[Bar]:
    """A bar for each of `changes`."""
    size = steps[0].strategy.micro_batch_size
    plain = [
        each.strategy
        for each in steps
        if (each.strategy.micro_batch_size, each.strategy.checkpointed_blocks) == (size, 0)
    ]
    asked = [requests(sample, strategy, (size,)) for strategy in plain]
    answers = iter(pool.rehearse([request for batch in asked for request in batch]))
    found = [_rehearsed(sample, each, [next(answers) for _ in batch]) for each, batch in zip(plain, asked, strict=True)]
    for change in steps[len(plain) :]:
        at = change.strategy.micro_batch_size, int(change.strategy.checkpointed_blocks)
        peaks = chosen.option.arrangement.peaks(*at)
        found.append(Bar(peaks, chosen.option.reserved(*at) - max(peaks.values())))
    return found


def _run(device: Device, sample: Sample, steps: Sequence[Change], found: Sequence[Bar]) -> list[Bar]:
    """The same as they ran, but for the last, which did; as they were where one could not be run."""
    requests = [sample.request(recorded_part(each.strategy)) for each in steps[:-1]]
    ran = []
    for bar, attempt in zip(found, device.run([(request, ROOM) for request in requests]), strict=False):
        if attempt is None or not attempt.ran:
            ran.append(bar)
        else:
            ran.append(replace(bar, ran_bytes=attempt.peak_reserved_bytes))
    return [*ran, found[-1]]


def _rehearsed(sample: Sample, strategy: Strategy, answers: Sequence[RehearsedSize | UserError]) -> Bar:
    known = []
    for answer in answers:
        if isinstance(answer, UserError):
            raise answer
        known.append(answer)
    peaks = outline(sample.model, strategy, known).peaks(strategy.micro_batch_size)
    # Flat partitions and temporaries as large as they leave pieces that grow with the depth, as the bytes do.
    idle = [_idle(answer.timeline, sample.gpu.usable_bytes) for answer in known]
    encoders = max(phase.at_peak.get("encoder", 0) for phase in known[0].ledger.phases)
    return Bar(peaks, max(float(np.dot(grid(sample.model).weights, idle)), idle[-1]), encoders)


def _idle(timeline: Timeline, card_bytes: int) -> int:
    found = replay(timeline, UNLIMITED, expandable_segments=True, card_bytes=card_bytes)
    return found.peak_reserved_bytes - timeline.peak_allocated_bytes


def said(change: Change, before: Bar | None, bar: Bar) -> str:
    """Why the bar is as long as it is: `VAE and text encoders leave the card (6.03 GiB): 8.55 GiB less`."""
    if before is None:
        held = f"; the encoders hold {gib(bar.encoder_bytes)}" if bar.encoder_bytes else ""
        return f"the {bar.phase} decides{held}"
    left = before.encoder_bytes - bar.encoder_bytes
    less = before.reserved_bytes - bar.reserved_bytes
    least = before.reserved_bytes * WORTH_SAYING
    effect = f"{gib(abs(less))} {'less' if less > 0 else 'more'}" if abs(less) >= least else "nothing at the peak"
    drops = {phase: before.peaks[phase] - peak for phase, peak in bar.peaks.items() if phase in before.peaks}
    most = max(drops, key=lambda phase: drops[phase])
    parts = [f"{change.why}{f' ({gib(left)})' if left > 0 else ''}: {effect}"]
    if most != bar.phase and drops[most] > max(less, 0) + least:
        parts.append(f"{gib(drops[most])} less in the {most}, which does not decide")
    if bar.phase != before.phase:
        parts.append(f"now the {bar.phase} decides")
    return "; ".join(parts)
