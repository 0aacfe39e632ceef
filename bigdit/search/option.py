"""An option: strategies that differ only in the sizes of their steps. A few attempts predict all other sizes.

Predictions only say where to try next; no figure of a plan is a prediction. The bytes of a phase are linear in the
micro-batch. A recomputed block saves what it would keep from the forward to the backward pass. Fragmentation differs
from size to size: each run corrects the predictions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from bigdit.config.strategy_text import LARGEST_MICRO_BATCH
from bigdit.profile.attempt import Attempt
from bigdit.search.plan import Estimate, lossy_by
from bigdit.speed.seconds import Launches, launches_of
from bigdit.speed.work import Work, work_of
from bigdit.strategy import Strategy

FIRST = 2
"""Micro-batch size of the first attempts. At 1, torch takes some tensors as contiguous that otherwise are not."""

SECOND = 4
"""Smallest micro-batch size of the second attempts, which are about as large as fits."""

OF_ACTIVATIONS = ("encode", "forward", "backward")
OF_STATE = ("ema", "step")
"""Phases that may end a step, the last one first."""


class Growth(NamedTuple):
    """A number that grows by `slope` with each sample. It is `start` at the micro-batch size FIRST."""

    start: float
    slope: float

    def at(self, micro_batch_size: float) -> float:
        return self.start + (micro_batch_size - FIRST) * self.slope

    def plus(self, more: float) -> Growth:
        return Growth(self.start + more, self.slope)


@dataclass(frozen=True)
class Policy:
    """The cost of steps with nothing recomputed, or with all blocks recomputed.

    In bytes: `peaks` of each phase; `kept` from the forward to the backward pass; `within`, the temporaries of each
    sample at the start of the backward pass; `left` at its end; `host`, the peak in CPU memory with saving. `ran` are
    the attempts by micro-batch size. `work` is that of a step at FIRST, `growth` that of each further sample.
    """

    peaks: Mapping[str, Growth]
    kept: Growth
    within: float
    left: Growth
    host: Growth
    work: Work
    growth: Work
    ran: Mapping[int, Attempt]

    @classmethod
    def of(cls, strategies: Sequence[Strategy], ran: Sequence[Attempt], none: Policy | None = None) -> Policy:
        """From attempts of a strategy at FIRST and at a larger micro-batch size, without a memory limit.

        `none` is the policy with nothing recomputed. Without it, the work of both attempts was counted; with it, only
        that of the first: the work of recomputation is proportional to the samples.
        """
        strategy, (small, large) = strategies[0], ran
        first, second = sizes = [each.micro_batch_size for each in strategies]

        def line(low: float, high: float) -> Growth:
            return Growth(low, (high - low) / (second - first))

        work = work_of(small.work, strategy)
        growth = (work_of(large.work, strategy) - work) * (1 / (second - first)) if none is None else none.growth
        if none is not None:
            growth += (work - none.work) * (1 / FIRST)
        end, start = large.phases["backward"], large.phases["forward"]
        return cls(
            peaks={
                phase: line(small.phases[phase].peak_bytes, large.phases[phase].peak_bytes)
                for phase in small.phases
                if phase in large.phases
            },
            kept=line(small.phases["forward"].end_bytes, start.end_bytes),
            within=max(end.peak_bytes - start.end_bytes, 0) / second,
            left=line(small.phases["backward"].end_bytes, end.end_bytes),
            host=line(host_peak(small), host_peak(large)),
            work=work,
            growth=growth,
            ran=dict(zip(sizes, ran, strict=True)),
        )

    def with_samples_of(self, strategy: Strategy, ran: Attempt, share: float = 1.0) -> Policy:
        """The policy of `strategy`, from one attempt at FIRST whose work was counted.

        Its bytes without samples are this policy's, and the attempt gives what a sample adds. `share`: the most of this
        policy's temporaries of a sample.
        """

        def line(other: Growth, found: float) -> Growth:
            return Growth(found, (found - other.at(0)) / FIRST)

        work, start, end = work_of(ran.work, strategy), ran.phases["forward"], ran.phases["backward"]
        return Policy(
            peaks={phase: line(self.peaks[phase], each.peak_bytes) for phase, each in ran.phases.items()},
            kept=line(self.kept, start.end_bytes),
            within=min(self.within * share, max(end.peak_bytes - start.end_bytes, 0) / FIRST),
            left=line(self.left, end.end_bytes),
            host=line(self.host, host_peak(ran)),
            work=work,
            growth=self.growth + (work - self.work) * (1 / FIRST),
            ran={FIRST: ran},
        )

    def varied(self, strategy: Strategy, before: Attempt, after: Attempt) -> Policy:
        """The policy with another optimizer, EMA or masters, from attempts `before` and `after` the change at FIRST.

        Activations stay. State, and phases without activations, are those of `after`, which ran `strategy`.
        """
        more = _bytes_between_steps(after) - _bytes_between_steps(before)
        peaks = {
            phase: self.peaks[phase].plus(more)
            if phase in OF_ACTIVATIONS and phase in self.peaks
            else Growth(found.peak_bytes, self.peaks[phase].slope if phase in self.peaks else 0.0)
            for phase, found in after.phases.items()
        }
        step = work_of(after.work, strategy).step if after.packed_work else self.work.step
        return replace(
            self,
            peaks=peaks,
            kept=self.kept.plus(more),
            left=self.left.plus(more),
            host=self.host.plus(host_peak(after) - host_peak(before)),
            work=replace(self.work, step=step),
            growth=replace(self.growth, step=step * 0.0),
        )

    def phases(self, micro_batch_size: float) -> dict[str, float]:
        """Peak bytes of each phase. The backward pass peaks at its start, with all kept activations, or at its end,
        with all gradients."""
        found = {phase: line.at(micro_batch_size) for phase, line in self.peaks.items()}
        start = self.kept.at(micro_batch_size) + self.within * micro_batch_size
        return found | {"backward": max(start, self.left.at(micro_batch_size))}

    def idle_at(self, micro_batch_size: float) -> float:
        """Bytes that are reserved but not allocated, interpolated between the sizes that ran."""
        sizes = sorted(self.ran)
        idle = [self.ran[size].peak_reserved_bytes - self.ran[size].peak_allocated_bytes for size in sizes]
        return float(np.interp(micro_batch_size, sizes, idle))


def filling(ran: Sequence[Attempt], count: int, capacity_bytes: int) -> list[int]:
    """About the micro-batch sizes that fill `capacity_bytes` with nothing and with all `count` blocks recomputed, from
    attempts of both at FIRST."""
    state = [_bytes_between_steps(each) for each in ran]
    none, full = ((each.phases["forward"].end_bytes - own) / FIRST for each, own in zip(ran, state, strict=True))
    # One block at a time is recomputed, and its backward pass takes as much again.
    samples = none, full + 2 * max(none - full, 0) / max(count, 1)
    return [int((capacity_bytes - own) / max(each, 1)) for each, own in zip(samples, state, strict=True)]


def host_peak(attempt: Attempt) -> int:
    """Peak bytes of tensors in CPU memory, as the process starts, steps or saves."""
    return attempt.host.saving(attempt.checkpoint_bytes)


def state_bytes(attempt: Attempt) -> int:
    """Peak bytes of the phases that have no activations: the start, and the optimizer's step."""
    return max(each.peak_bytes for phase, each in attempt.phases.items() if phase not in OF_ACTIVATIONS)


def _bytes_between_steps(attempt: Attempt) -> int:
    return next(attempt.phases[phase].end_bytes for phase in OF_STATE if phase in attempt.phases)


@dataclass(frozen=True)
class Swapping:
    """The effect of block swap: attempts with no block, `least` and `most` blocks swapped, and the `work` of most."""

    least: int
    most: int
    none: Attempt
    few: Attempt
    all: Attempt
    work: Work

    def of(self, policy: Policy, blocks: int) -> Policy:
        """`policy` with so many blocks swapped, interpolated between `least` and `most` by the bytes of their weights:
        Flux.1's first blocks have more than twice those of its last ones."""
        held, least, most = (sum(self.none.block_bytes[:each]) for each in (blocks, self.least, self.most))
        share = (held - least) / max(most - least, 1)

        def between(few: float, many: float) -> float:
            return few + share * (many - few)

        more = {
            phase: between(self.few.phases[phase].peak_bytes, self.all.phases[phase].peak_bytes) - none.peak_bytes
            for phase, none in self.none.phases.items()
        }
        host = between(host_peak(self.few), host_peak(self.all)) - host_peak(self.none)
        return replace(
            policy,
            peaks={phase: line.plus(more.get(phase, 0.0)) for phase, line in policy.peaks.items()},
            kept=policy.kept.plus(more["backward"]),
            left=policy.left.plus(more["backward"]),
            host=policy.host.plus(host),
            work=policy.work + self.work * (held / most),
        )


SizeKey = tuple[str, int, int]
"""An option's title, the micro-batch size, and the number of recomputed blocks."""


@dataclass(eq=False)
class Option:
    """An engine with an optimizer, precision and EMA; `strategy` has a micro-batch of one and nothing recomputed.

    `base` is the option with the same activations and gradients and another state, if there is one. With block swap, it
    is the option without, and `strategy.blocks_to_swap` is the largest number to try.
    `last_resort` orders options that save little memory for much time; each is tried where all below it do not fit.
    1: slow and lossless. 2: all weights in CPU memory. 3: lossy, without copies over PCIe. 4: lossy, with copies.
    5: the CPU steps another optimizer than AdamW with masters, which takes minutes.

    An explored option predicts from policies with nothing (`none`) and with all (`full`) of `count` blocks recomputed.
    `anchor` is the attempt with nothing recomputed at the smallest size. `corrections` are the shares by which torch
    reserved more than predicted; options with the same activations share them. `found` has reserved bytes by recomputed
    blocks and micro-batch size, without a memory limit. `predicted` has estimates by micro-batch size, accumulation and
    recomputed blocks, without later corrections.
    """

    title: str
    strategy: Strategy
    base: Option | None = None
    last_resort: Literal[0, 1, 2, 3, 4, 5] = 0
    none: Policy = field(init=False, repr=False)
    full: Policy = field(init=False, repr=False)
    count: int = field(init=False)
    anchor: Attempt = field(init=False, repr=False)
    corrections: dict[SizeKey, float] = field(default_factory=dict, repr=False)
    found: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    predicted: dict[tuple[int, int, int], Estimate] = field(default_factory=dict, repr=False)

    def predicting(
        self, none: Policy, full: Policy, count: int, anchor: Attempt, alike: Option | None = None
    ) -> Option:
        """This option, ready to predict. `alike` has the same activations, and so the same corrections."""
        self.none, self.full, self.count, self.anchor = none, full, count, anchor
        if alike is not None:
            self.corrections = alike.corrections
        return self

    @property
    def waits(self) -> bool:
        """Whether steps wait for copies over PCIe."""
        return bool(self.last_resort in (1, 2, 4, 5) or self.strategy.blocks_to_swap)

    @property
    def lossless(self) -> bool:
        """Whether the numbers are those of AdamW with fp32 masters."""
        return not lossy_by(self.strategy)

    def titled(self, micro_batch_size: int, blocks: int) -> str:
        """`ZeRO-2 on 8, AdamW, micro-batch 6, 4 of 20 blocks recomputed`."""
        known = {0: "nothing recomputed", self.count: "all blocks recomputed"}
        recomputed = known.get(blocks, f"{blocks} of {self.count} blocks recomputed")
        if blocks and self.strategy.checkpointed_segments is not None:
            recomputed += f", {self.strategy.checkpointed_segments.described}"
        return f"{self.title}, micro-batch {micro_batch_size}, {recomputed}"

    @property
    def quarters(self) -> list[int]:
        """Numbers of recomputed blocks, in quarters of all. Swapped blocks are always recomputed."""
        return sorted({max(self.strategy.blocks_to_swap, each) for each in quarters(self.count)})

    def launches(self, blocks: int, micro_batches: int) -> Launches | None:
        """Launches of a step, from first attempts of so many micro-batches; None if none were counted."""
        ran = self.anchor, self.none.ran[FIRST], self.full.ran[FIRST]
        own, none, full = (launches_of(each.launched, micro_batches) for each in ran)
        if own is None or none is None or full is None:
            return None
        return Launches(own.micro + (full.micro - none.micro) * blocks / self.count, own.step)

    def ran(self, blocks: int) -> dict[int, int]:
        """Reserved bytes by micro-batch size, of all sizes that ran with so many blocks recomputed."""
        policy = {0: self.none, self.count: self.full}.get(blocks)
        ran = {} if policy is None or self.base or self.strategy.blocks_to_swap else policy.ran
        found = {size: each.peak_reserved_bytes for size, each in ran.items()}
        return found | {size: nbytes for (of, size), nbytes in self.found.items() if of == blocks}

    def note(self, blocks: int, reserved: Mapping[int, int]) -> None:
        """Add reserved bytes of sizes that ran, without a correction of predictions."""
        self.found |= {(blocks, size): nbytes for size, nbytes in reserved.items()}

    def correct(self, micro_batch_size: int, blocks: int, reserved_bytes: int) -> None:
        """Correct predictions by the share that torch reserved more, or less, than predicted here."""
        self.note(blocks, {micro_batch_size: reserved_bytes})
        off = reserved_bytes / self.uncorrected(micro_batch_size, blocks) - 1
        self.corrections[self.title, micro_batch_size, blocks] = off

    def reserved(self, micro_batch_size: float, blocks: int) -> float:
        """Bytes that torch reserves with expandable segments: measured where it ran, else predicted."""
        if micro_batch_size in (ran := self.ran(blocks)):
            return ran[int(micro_batch_size)]
        return self.uncorrected(micro_batch_size, blocks) * (1 + self._correction(micro_batch_size, blocks))

    def _correction(self, micro_batch_size: float, blocks: int) -> float:
        """The nearest correction, of this option if it has any. It fades with distance: fragmentation is local."""
        if not self.corrections:
            return 0.0
        own = [at for at in self.corrections if at[0] == self.title]
        away = {
            at: abs(math.log(at[1] / micro_batch_size)) + abs(at[2] - blocks) / max(self.count, 1)
            for at in own or self.corrections
        }
        nearest = min(away, key=lambda at: away[at])
        return self.corrections[nearest] * math.exp(-away[nearest] / 2)

    def uncorrected(self, micro_batch_size: float, blocks: int) -> float:
        """Bytes that torch is expected to reserve, by the policies, without corrections."""
        ways = {0: (self.none,), self.count: (self.full,)}.get(blocks, (self.none, self.full))
        return max(self.peaks(micro_batch_size, blocks).values()) + max(each.idle_at(micro_batch_size) for each in ways)

    def peaks(self, micro_batch_size: float, blocks: int) -> dict[str, float]:
        """Peak bytes of each phase with the first `blocks` recomputed.

        The backward pass reaches them last. Before, it is as with nothing recomputed, less what these blocks do not
        keep. From there on it is as with all recomputed: everything behind them is freed.
        """
        plain, full = self.none.phases(micro_batch_size), self.full.phases(micro_batch_size)
        if blocks in (0, self.count):
            return plain if blocks == 0 else full
        share = blocks / self.count
        less = share * (self.none.kept.at(micro_batch_size) - self.full.kept.at(micro_batch_size))
        return full | {phase: max(full[phase], plain[phase] - less) for phase in OF_ACTIVATIONS if phase in plain}

    def work(self, micro_batch_size: float, blocks: int) -> Work:
        """The work of one step. Each recomputed block adds the same."""
        share = blocks / max(self.count, 1)
        none, full = (each.work + each.growth * (micro_batch_size - FIRST) for each in (self.none, self.full))
        return none * (1 - share) + full * share

    def host(self, micro_batch_size: float, blocks: int) -> float:
        """Peak bytes of a process's tensors in CPU memory."""
        return max((self.full if blocks else self.none).host.at(micro_batch_size), 0.0)

    def fewest_blocks(self, micro_batch_size: int, capacity_bytes: float) -> int | None:
        """The fewest blocks to recompute so that the step fits `capacity_bytes`; None where all are too few."""
        if self.reserved(micro_batch_size, self.count) > capacity_bytes:
            return None
        numbers, least = range(self.count), self.strategy.blocks_to_swap
        return bisect_left(
            numbers, True, least, key=lambda each: self.reserved(micro_batch_size, each) <= capacity_bytes
        )

    def largest(self, blocks: int, capacity_bytes: float) -> int:
        """The largest micro-batch that fits with so many recomputed blocks, up to LARGEST_MICRO_BATCH; 0 for none."""
        sizes = range(1, LARGEST_MICRO_BATCH + 1)
        return bisect_left(sizes, True, key=lambda size: self.reserved(size, blocks) > capacity_bytes)


def quarters(count: int) -> list[int]:
    """0 to `count` blocks, in quarters."""
    return sorted({0, count // 4, count // 2, 3 * count // 4, count})
