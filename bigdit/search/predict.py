"""What a few attempts say of other sizes: where to try next. Nothing that is shown stands on it.

Bytes of a phase grow evenly with the micro-batch. A recomputed block spares what it does not keep from the forward to
the backward pass. How the allocator's pieces fit changes from place to place: each run corrects what is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from bigdit.profile.attempt import Attempt
from bigdit.speed.work import Work, work_of
from bigdit.strategy import Strategy

FIRST = 2
"""The micro-batch size that attempts begin with. At 1, torch takes some tensors as contiguous that are not so else."""

SECOND = 4
"""The least of the second ones, each about as large as fits."""

OF_ACTIVATIONS = ("encode", "forward", "backward")
OF_STATE = ("ema", "step")
"""The phases that a step may end with, the last one first."""


class Line(NamedTuple):
    """A number that grows by `slope` with each sample of the micro-batch; `start` is at FIRST."""

    start: float
    slope: float

    def at(self, micro_batch_size: float) -> float:
        return self.start + (micro_batch_size - FIRST) * self.slope

    def plus(self, more: float) -> Line:
        return Line(self.start + more, self.slope)


@dataclass(frozen=True)
class Policy:
    """Steps with nothing recomputed, or with all blocks.

    Bytes: `peaks` of each phase; `kept` from the forward to the backward pass; `within`, for each sample, what the
    start of the backward pass takes beside that; `left` where it ends. `idle` is what torch reserves beyond what is
    allocated, `host` what host tensors take at the most, saving included, `reserved` torch's of the sizes that ran.
    `work` and `growth`: of a step at FIRST, and of each further sample.
    """

    peaks: Mapping[str, Line]
    kept: Line
    within: float
    left: Line
    idle: Mapping[int, int]
    host: Line
    work: Work
    growth: Work
    reserved: Mapping[int, int]

    def phases(self, micro_batch_size: float) -> dict[str, float]:
        """The most bytes of each phase. The backward pass is highest at its start, where all is there that was kept, or
        at its end, where all gradients are."""
        found = {phase: line.at(micro_batch_size) for phase, line in self.peaks.items()}
        start = self.kept.at(micro_batch_size) + self.within * micro_batch_size
        return found | {"backward": max(start, self.left.at(micro_batch_size))}

    def idle_at(self, micro_batch_size: float) -> float:
        """What torch is expected to reserve beyond what is allocated: between what it did at both sizes."""
        return float(np.interp(micro_batch_size, [*self.idle], [*self.idle.values()]))

    def moved(self, peaks: Mapping[str, float], host: float, work: Work) -> Policy:
        """The same with so many bytes more in each phase and on the host, and more work."""
        more = peaks["backward"]
        return replace(
            self,
            peaks={phase: line.plus(peaks.get(phase, 0.0)) for phase, line in self.peaks.items()},
            kept=self.kept.plus(more),
            left=self.left.plus(more),
            host=self.host.plus(host),
            work=self.work + work,
        )


def policy(strategy: Strategy, ran: Mapping[int, Attempt], none: Policy | None = None) -> Policy:
    """From attempts of `strategy` at FIRST and another micro-batch size, without a limit of bytes; counted at FIRST.

    What recomputing adds to `none`, the same with nothing recomputed, grows with the samples. Without `none` the second
    attempt is counted too.
    """
    (first, second), (small, large) = ran, ran.values()

    def line(low: float, high: float) -> Line:
        return Line(low, (high - low) / (second - first))

    work = work_of(small.work, strategy)
    growth = (work_of(large.work, strategy) - work) * (1 / (second - first)) if none is None else none.growth
    if none is not None:
        growth += (work - none.work) * (1 / FIRST)
    end, start = large.phases["backward"], large.phases["forward"]
    return Policy(
        peaks={
            phase: line(small.phases[phase].peak_bytes, large.phases[phase].peak_bytes)
            for phase in small.phases
            if phase in large.phases
        },
        kept=line(small.phases["forward"].end_bytes, start.end_bytes),
        within=max(end.peak_bytes - start.end_bytes, 0) / second,
        left=line(small.phases["backward"].end_bytes, end.end_bytes),
        idle={size: _idle(each) for size, each in ran.items()},
        host=line(host_peak(small), host_peak(large)),
        work=work,
        growth=growth,
        reserved={size: each.peak_reserved_bytes for size, each in ran.items()},
    )


def sample_bytes(attempt: Attempt) -> float:
    """What each sample keeps from the forward to the backward pass, by an attempt at FIRST."""
    return (attempt.phases["forward"].end_bytes - _left(attempt)) / FIRST


def filling(attempt: Attempt, sample: float, capacity_bytes: int) -> int:
    """About the micro-batch size that fills so many bytes, by an attempt at FIRST, where each takes `sample` bytes."""
    return int((capacity_bytes - _left(attempt)) / max(sample, 1))


def host_peak(attempt: Attempt) -> int:
    """The most bytes of host tensors, as the process starts, steps or saves."""
    return attempt.host.saving(attempt.checkpoint_bytes)


def state_bytes(attempt: Attempt) -> int:
    """The most that the start and the optimizer's step take: no activation is there."""
    return max(each.peak_bytes for phase, each in attempt.phases.items() if phase not in OF_ACTIVATIONS)


def varied(base: Policy, strategy: Strategy, before: Attempt, after: Attempt) -> Policy:
    """`base` with another optimizer, EMA or masters, from one attempt with each at FIRST.

    Activations stay; the state beside them, and the phases without them, are those of `after`, that of `strategy`.
    """
    more = _left(after) - _left(before)
    peaks = {
        phase: base.peaks[phase].plus(more)
        if phase in OF_ACTIVATIONS and phase in base.peaks
        else Line(found.peak_bytes, base.peaks[phase].slope if phase in base.peaks else 0.0)
        for phase, found in after.phases.items()
    }
    step = work_of(after.work, strategy).step if after.packed_work else base.work.step
    return replace(
        base,
        peaks=peaks,
        kept=base.kept.plus(more),
        left=base.left.plus(more),
        host=base.host.plus(host_peak(after) - host_peak(before)),
        work=replace(base.work, step=step),
        growth=replace(base.growth, step=step * 0.0),
    )


@dataclass(frozen=True)
class Swapping:
    """What differs where blocks' weights wait on the host: attempts with none, the `least` and the `most` of them, and
    the `work` that each adds."""

    least: int
    most: int
    none: Attempt
    few: Attempt
    all: Attempt
    work: Work

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
        return policy.moved(peaks, host, self.work * blocks)


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
        plain, full = self.none.phases(micro_batch_size), self.full.phases(micro_batch_size)
        if recomputed in (0, self.count):
            return plain if recomputed == 0 else full
        share = recomputed / self.count
        less = share * (self.none.kept.at(micro_batch_size) - self.full.kept.at(micro_batch_size))
        return full | {phase: max(full[phase], plain[phase] - less) for phase in OF_ACTIVATIONS if phase in plain}

    def reserved(self, micro_batch_size: float, recomputed: int) -> float:
        """Bytes that torch is expected to reserve."""
        ways = {0: (self.none,), self.count: (self.full,)}.get(recomputed, (self.none, self.full))
        return max(self.peaks(micro_batch_size, recomputed).values()) + max(
            each.idle_at(micro_batch_size) for each in ways
        )

    def work(self, micro_batch_size: float, recomputed: int) -> Work:
        """What one step does with that many blocks recomputed, each costing the same."""
        share = recomputed / max(self.count, 1)
        none, full = (each.work + each.growth * (micro_batch_size - FIRST) for each in (self.none, self.full))
        return none * (1 - share) + full * share

    def host(self, micro_batch_size: float, recomputed: int) -> float:
        """The most bytes of host tensors."""
        return max((self.full if recomputed else self.none).host.at(micro_batch_size), 0.0)


def _idle(attempt: Attempt) -> int:
    return attempt.peak_reserved_bytes - attempt.peak_allocated_bytes


def _left(attempt: Attempt) -> int:
    """What lives between two steps."""
    return next(attempt.phases[phase].end_bytes for phase in OF_STATE if phase in attempt.phases)
