"""What a few attempts say of other sizes: where to try next. Nothing that is shown stands on it.

Bytes of a phase grow evenly with the micro-batch. A recomputed block spares what it does not keep from the forward to
the backward pass. How the allocator's pieces fit changes from place to place: each run corrects what is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from bigdit.profile.attempt import Attempt
from bigdit.spec import Strategy
from bigdit.speed.work import Work, work_of

SIZES = (2, 4)
"""Micro-batch sizes that attempts are made at. At 1, torch takes some tensors as contiguous that are not so at any other
size."""

OF_ACTIVATIONS = ("encode", "forward", "backward")
OF_STATE = ("ema", "step")
"""The phases that a step may end with, the last one first."""


class Line(NamedTuple):
    """A number that grows by `slope` with each sample of the micro-batch; `start` is at the first of SIZES."""

    start: float
    slope: float

    def at(self, micro_batch_size: float) -> float:
        return self.start + (micro_batch_size - SIZES[0]) * self.slope

    def plus(self, more: float) -> Line:
        return Line(self.start + more, self.slope)


@dataclass(frozen=True)
class Policy:
    """Steps with nothing recomputed, or with all blocks.

    Bytes: `peaks` of each phase, `kept` from the forward to the backward pass, `idle` that torch reserves beyond what is
    allocated, `host` of host tensors at the most, saving included. `work` and `growth`: of a step at the first of SIZES,
    and of each further sample. `reserved`: by torch at both SIZES.
    """

    peaks: Mapping[str, Line]
    kept: Line
    idle: int
    host: Line
    work: Work
    growth: Work
    reserved: Mapping[int, int]

    def moved(self, peaks: Mapping[str, float], host: float, work: Work) -> Policy:
        """The same with so many bytes more in each phase and on the host, and more work."""
        lines = {phase: line.plus(peaks.get(phase, 0.0)) for phase, line in self.peaks.items()}
        return replace(self, peaks=lines, host=self.host.plus(host), work=self.work + work)


def policy(strategy: Strategy, small: Attempt, large: Attempt) -> Policy:
    """From counted attempts of `strategy` at both SIZES, without a limit of bytes."""
    span = SIZES[1] - SIZES[0]

    def line(low: float, high: float) -> Line:
        return Line(low, (high - low) / span)

    works = [work_of(each.work, strategy) for each in (small, large)]
    return Policy(
        peaks={
            phase: line(small.phases[phase].peak_bytes, large.phases[phase].peak_bytes)
            for phase in small.phases
            if phase in large.phases
        },
        kept=line(small.phases["forward"].end_bytes, large.phases["forward"].end_bytes),
        idle=max(_idle(small), _idle(large)),
        host=line(host_peak(small), host_peak(large)),
        work=works[0],
        growth=(works[1] - works[0]) * (1 / span),
        reserved={size: each.peak_reserved_bytes for size, each in zip(SIZES, (small, large), strict=True)},
    )


def host_peak(attempt: Attempt) -> int:
    """The most bytes of host tensors, as the process starts, steps or saves."""
    return max(attempt.host.saving(attempt.checkpoint_bytes))


def state_bytes(attempt: Attempt) -> int:
    """The most that the start and the optimizer's step take: no activation is there."""
    return max(each.peak_bytes for phase, each in attempt.phases.items() if phase not in OF_ACTIVATIONS)


def varied(base: Policy, strategy: Strategy, before: Attempt, after: Attempt) -> Policy:
    """`base` with another optimizer, EMA or masters, from one attempt with each at the first of SIZES.

    Activations stay; the state beside them, and the phases without them, are those of `after`, that of `strategy`.
    """
    more = _left(after) - _left(before)
    peaks = {
        phase: base.peaks[phase].plus(more)
        if phase in OF_ACTIVATIONS and phase in base.peaks
        else Line(found.peak_bytes, base.peaks[phase].slope if phase in base.peaks else 0.0)
        for phase, found in after.phases.items()
    }
    work = work_of(after.work, strategy)
    return replace(
        base,
        peaks=peaks,
        host=base.host.plus(host_peak(after) - host_peak(before)),
        work=replace(base.work, step=work.step),
        growth=replace(base.growth, step=work.step * 0.0),
    )


@dataclass(frozen=True)
class Swapping:
    """What differs where blocks' weights wait on the host: attempts with none, the `least` and the `most` of them."""

    least: int
    most: int
    none: Attempt
    few: Attempt
    all: Attempt
    works: tuple[Work, Work, Work]

    def of(self, policy: Policy, blocks: int) -> Policy:
        """`policy` with weights of so many blocks on the host: all of it grows evenly from `least` to `most`."""
        share = (blocks - self.least) / max(self.most - self.least, 1)

        def between(few: float, many: float) -> float:
            return few + share * (many - few)

        peaks = {
            phase: between(self.few.phases[phase].peak_bytes, self.all.phases[phase].peak_bytes) - none.peak_bytes
            for phase, none in self.none.phases.items()
        }
        host = between(host_peak(self.few), host_peak(self.all)) - host_peak(self.none)
        none, few, many = self.works
        return policy.moved(peaks, host, (few - none) + (many - few) * share)


@dataclass(frozen=True)
class Arrangement:
    """An engine with an optimizer, over a model of `count` blocks that can be recomputed."""

    none: Policy
    full: Policy
    count: int

    def peaks(self, micro_batch_size: float, recomputed: int) -> dict[str, float]:
        """Bytes of each phase with the first `recomputed` blocks recomputed.

        Until the backward pass comes to those blocks it is as without, less what they do not keep; from there on all
        behind them is freed, as it is with all of them recomputed.
        """
        plain = {phase: line.at(micro_batch_size) for phase, line in self.none.peaks.items()}
        full = {phase: line.at(micro_batch_size) for phase, line in self.full.peaks.items()}
        if recomputed in (0, self.count):
            return plain if recomputed == 0 else full
        share = recomputed / self.count
        less = share * (self.none.kept.at(micro_batch_size) - self.full.kept.at(micro_batch_size))
        return full | {phase: max(full[phase], plain[phase] - less) for phase in OF_ACTIVATIONS if phase in plain}

    def reserved(self, micro_batch_size: float, recomputed: int) -> float:
        """Bytes that torch is expected to reserve."""
        ways = {0: (self.none,), self.count: (self.full,)}.get(recomputed, (self.none, self.full))
        return max(self.peaks(micro_batch_size, recomputed).values()) + max(each.idle for each in ways)

    def work(self, micro_batch_size: float, recomputed: int) -> Work:
        """What one step does with that many blocks recomputed, each costing the same."""
        share = recomputed / max(self.count, 1)
        none, full = (each.work + each.growth * (micro_batch_size - SIZES[0]) for each in (self.none, self.full))
        return none * (1 - share) + full * share

    def host(self, micro_batch_size: float, recomputed: int) -> float:
        """The most bytes of host tensors."""
        return max((self.full if recomputed else self.none).host.at(micro_batch_size), 0.0)


def _idle(attempt: Attempt) -> int:
    return attempt.peak_reserved_bytes - attempt.peak_allocated_bytes


def _left(attempt: Attempt) -> int:
    """What lives between two steps."""
    return next(attempt.phases[phase].end_bytes for phase in OF_STATE if phase in attempt.phases)
