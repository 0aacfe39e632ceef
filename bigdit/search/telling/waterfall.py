"""What each change from the copied setting to the recommended one leaves of the GPU's bytes: each of them runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigdit.profile.attempt import UNLIMITED, Attempt
from bigdit.search.finding.candidates import Planner
from bigdit.search.finding.confirm import Confirmed
from bigdit.search.finding.verdict import process, verdict_of
from bigdit.search.plan import Step
from bigdit.search.telling.changes import Change, changes
from bigdit.units import gib

WORTH_SAYING = 0.005
"""Of the bytes before: smaller effects are called nothing."""


@dataclass(frozen=True)
class Bar:
    """Allocated bytes by phase, and what torch reserved."""

    peaks: Mapping[str, int]
    reserved_bytes: int

    @property
    def phase(self) -> str:
        """The peak phase."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])


def waterfall(planner: Planner, chosen: Confirmed) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """The bars from the naive setting to `chosen`, without those that could not be run, and a line for each such."""
    question, steps = planner.question, changes(planner.question, chosen.candidate)
    attempts = planner.cards.attempts([(planner.request(each.strategy), UNLIMITED) for each in steps[:-1]])
    shown: list[Step] = []
    notices, before = [], None
    for change, attempt in zip(steps[:-1], attempts, strict=True):
        if not isinstance(attempt, Attempt) or not attempt.ran:
            why = attempt.out_of_memory if isinstance(attempt, Attempt) else attempt
            notices.append(f"not shown on the way to the recommended setting: {change.title}: {why}".splitlines()[0])
            continue
        bar = Bar({phase: each.peak_bytes for phase, each in attempt.phases.items()}, attempt.peak_reserved_bytes)
        taken = process(bar.reserved_bytes, planner.non_torch(change.strategy), planner.band)
        verdict = verdict_of(taken, question.gpu.usable_bytes)
        shown.append(_step(change, before, bar, taken.high_bytes, verdict))
        before = bar
    last = Bar(chosen.ran.phases, chosen.ran.reserved_bytes)
    shown.append(_step(steps[-1], before, last, chosen.taken.high_bytes, chosen.verdict))
    return tuple(shown), tuple(notices)


def _step(change: Change, before: Bar | None, bar: Bar, process_bytes: int, verdict: str) -> Step:
    return Step.model_validate(
        {
            "change": change.title,
            "process_bytes": process_bytes,
            "verdict": verdict,
            "saved_by": effect(change, before, bar),
        }
    )


def effect(change: Change, before: Bar | None, bar: Bar) -> str:
    """Why the bar is as long as it is: `VAE and text encoders leave the GPU: 8.55 GiB less`."""
    if before is None:
        return f"peak phase: {bar.phase}"
    less = before.reserved_bytes - bar.reserved_bytes
    least = before.reserved_bytes * WORTH_SAYING
    said = f"{gib(abs(less))} {'less' if less > 0 else 'more'}" if abs(less) >= least else "nothing at the peak"
    drops = {phase: before.peaks[phase] - peak for phase, peak in bar.peaks.items() if phase in before.peaks}
    most = max(drops, key=lambda phase: drops[phase])
    parts = [f"{change.why}: {said}"]
    if most != bar.phase and drops[most] > max(less, 0) + least:
        parts.append(f"{gib(drops[most])} less in the {most}, which is not the peak")
    if bar.phase != before.phase:
        parts.append(f"peak phase: {bar.phase}")
    return "; ".join(parts)
