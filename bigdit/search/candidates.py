"""From predicted arrangements to strategies in order: the micro-batch, the blocks to recompute, the speed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bigdit.catalog import Gpu
from bigdit.memory.process import ByteRange, beside_training
from bigdit.profile.attempt import Attempt, StepRequest, request_for
from bigdit.profile.cards import LARGEST_MICRO_BATCH, Cards
from bigdit.search.calibration import UNPROVED, Evidence
from bigdit.search.plan import Band, Verdict, node_bytes
from bigdit.search.predict import Arrangement
from bigdit.search.question import Question
from bigdit.search.space import Proposal
from bigdit.speed.seconds import Interval, StepTime
from bigdit.speed.step import step_time
from bigdit.strategy import Strategy

SAME_SPEED = 0.05
"""Strategies within this share of the fastest one's speed, at both ends of their intervals, are as fast as it: bounds
that are two to three times apart do not tell smaller differences, whichever of them is true."""


SAME_ROOM = UNPROVED.share
"""Bytes within this share of each other are as many: more than that is not known of a real card. No block is recomputed
for them."""


RECORDED_ACCUMULATION = 2
"""Micro-batches of a step in an attempt, at most: from the second on all find the same memory."""


@dataclass(frozen=True)
class Planner:
    """What a plan is made of: the question, the emulated GPUs that answer, and what receipts say."""

    question: Question
    cards: Cards
    evidence: Evidence

    @property
    def band(self) -> Band:
        return self.evidence.band

    def request(self, strategy: Strategy, resolution: tuple[int, int] | None = None) -> StepRequest:
        """Steps of `strategy`, with as many micro-batches as tell what all of them take."""
        if strategy.checkpointed_blocks == 0:  # selective or not: the same steps are asked for once
            strategy = strategy.model_copy(update={"checkpointing": "full"})
        if strategy.grad_accum_steps > RECORDED_ACCUMULATION:
            fewer = strategy.step_size.model_copy(update={"grad_accum_steps": RECORDED_ACCUMULATION})
            strategy = strategy.sized(fewer)
        question = self.question
        size = resolution or question.resolution
        return request_for(question.model, question.gpu, strategy, resolution=size, frames=question.frames)

    def non_torch(self, strategy: Strategy) -> ByteRange:
        """What the process takes of the GPU beside torch."""
        return beside_training(strategy, self.question.gpu.compute_capability, self.question.gpu.multiprocessors)

    def capacity(self, strategy: Strategy) -> int:
        """What torch may reserve for the strategy to FIT."""
        return safe_bytes(self.question.gpu, self.non_torch(strategy), self.band)


Place = tuple[str, int, int]
"""A proposal's title, the micro-batch size, and the number of recomputed blocks."""


@dataclass
class Option:
    """A proposal with its arrangement, of one question.

    By title, micro-batch size and recomputed blocks: `wanted`, what torch reserved there without a limit, and
    `corrections`, by what share that differed from what was predicted; of this option and all that share activations.
    `steps`: the times that were found, by micro-batch size, accumulation and recomputed blocks. `anchor`: the attempt
    with nothing recomputed at the smallest of the sizes that predictions stand on.
    """

    proposal: Proposal
    arrangement: Arrangement
    corrections: dict[Place, float] = field(default_factory=dict)
    anchor: Attempt = field(kw_only=True, repr=False)
    steps: dict[tuple[int, int, int], StepTime] = field(default_factory=dict, repr=False)
    wanted: dict[Place, int] = field(default_factory=dict, repr=False)

    @property
    def least_blocks(self) -> int:
        """So many are recomputed at least: those whose weights wait on the host."""
        return self.proposal.strategy.blocks_to_swap

    @property
    def quarters(self) -> list[int]:
        """The least number of recomputed blocks to all, in quarters of these."""
        return sorted({max(self.least_blocks, each) for each in quarters(self.arrangement.count)})

    def ran(self, blocks: int) -> dict[int, int]:
        """What torch reserved with so many blocks recomputed, by the micro-batch size, of all sizes that ran."""
        policy = {0: self.arrangement.none, self.arrangement.count: self.arrangement.full}.get(blocks)
        found = {} if policy is None or self.proposal.base or self.least_blocks else dict(policy.reserved)
        return found | {
            at[1]: self.wanted[at] for at in self.wanted if at[0] == self.proposal.title and at[2] == blocks
        }

    def note(self, blocks: int, reserved: Mapping[int, int]) -> None:
        """What torch reserved at sizes that ran, which moves no prediction."""
        self.wanted.update({(self.proposal.title, size, blocks): nbytes for size, nbytes in reserved.items()})

    def like(self, other: Option) -> Option:
        """`other`, which shares activations with this one, and so its corrections."""
        return Option(other.proposal, other.arrangement, self.corrections, anchor=other.anchor)

    def correct(self, micro_batch_size: int, blocks: int, reserved_bytes: int) -> None:
        """Torch reserved so many bytes here: predict that share more, or less; less of it far away."""
        self.wanted[self.proposal.title, micro_batch_size, blocks] = reserved_bytes
        off = reserved_bytes / self.arrangement.reserved(micro_batch_size, blocks) - 1
        self.corrections[self.proposal.title, micro_batch_size, blocks] = off

    def reserved(self, micro_batch_size: float, blocks: int) -> float:
        """What torch is expected to reserve with expandable segments, or did where it ran."""
        if micro_batch_size in (ran := self.ran(blocks)):
            return ran[int(micro_batch_size)]
        return self.arrangement.reserved(micro_batch_size, blocks) * (1 + self._off(micro_batch_size, blocks))

    def _off(self, micro_batch_size: float, blocks: int) -> float:
        """The nearest correction, of this option if there is any. What is off is how the allocator's pieces fit, which
        changes from place to place."""
        if not self.corrections:
            return 0.0
        own = [at for at in self.corrections if at[0] == self.proposal.title]
        away = {
            at: abs(math.log(at[1] / micro_batch_size)) + abs(at[2] - blocks) / max(self.arrangement.count, 1)
            for at in own or self.corrections
        }
        nearest = min(away, key=lambda at: away[at])
        return self.corrections[nearest] * math.exp(-away[nearest] / 2)

    def fewest_blocks(self, micro_batch_size: int, capacity_bytes: float) -> int | None:
        """The fewest first blocks to recompute so that `capacity_bytes` are enough; None where all are too few."""
        low, high = self.least_blocks, self.arrangement.count
        if self.reserved(micro_batch_size, high) > capacity_bytes:
            return None
        while low < high:
            middle = (low + high) // 2
            fits = self.reserved(micro_batch_size, middle) <= capacity_bytes
            low, high = (low, middle) if fits else (middle + 1, high)
        return low


@dataclass(frozen=True)
class Candidate:
    """An option at one micro-batch size, accumulation and number of recomputed blocks."""

    option: Option
    micro_batch_size: int
    grad_accum_steps: int
    blocks: int
    step: StepTime

    @cached_property
    def strategy(self) -> Strategy:
        return self.option.proposal.strategy.settled(
            micro_batch_size=self.micro_batch_size,
            grad_accum_steps=self.grad_accum_steps,
            checkpointed_blocks=self.blocks,
        )

    @property
    def reserved_bytes(self) -> float:
        return self.option.reserved(self.micro_batch_size, self.blocks)

    def host_bytes(self, question: Question) -> int:
        """What a machine's processes are expected to take of its memory at the most."""
        return host_bytes(question, self.option, self.micro_batch_size, self.blocks)

    @property
    def place(self) -> Place:
        return self.option.proposal.title, self.micro_batch_size, self.blocks

    @property
    def lossless(self) -> bool:
        return self.option.proposal.lossless

    @property
    def selective(self) -> bool:
        return self.option.proposal.strategy.checkpointing == "selective" and self.blocks > 0

    @cached_property
    def rate(self) -> Interval:
        """Images a second of one card."""
        return self.step.seconds.per(self.micro_batch_size * self.grad_accum_steps)

    def as_fast_as(self, other: Candidate) -> bool:
        """Whether it cannot be told from `other` by its speed, or is the faster one."""
        least = 1 - SAME_SPEED
        return self.rate.low >= least * other.rate.low and self.rate.high >= least * other.rate.high


def preferred(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Lossless ones first, since nobody's numerics are changed unasked, and what is no last resort before what is one;
    of those that are as fast as the fastest, the one that takes least, and of those that take as much, to SAME_ROOM,
    that with fewest recomputed blocks; all others by their speed. Where nothing has to be recomputed, selective
    checkpointing comes first only if its speed can be told apart: no real GPU has shown smaller gains.
    """
    groups: dict[tuple[bool, int], list[Candidate]] = {}
    for each in candidates:
        groups.setdefault((not each.lossless, each.option.proposal.last_resort), []).append(each)
    return [each for _, group in sorted(groups.items()) for each in _roomy(group)]


def _roomy(candidates: Sequence[Candidate]) -> list[Candidate]:
    fastest = max(candidates, key=lambda each: each.rate.middle)
    near = [each for each in candidates if each.as_fast_as(fastest)]
    least = min(each.reserved_bytes for each in near)

    def room(each: Candidate) -> tuple[float, int, float]:
        as_much = each.reserved_bytes <= least * (1 + SAME_ROOM)
        return least if as_much else each.reserved_bytes, each.blocks, each.reserved_bytes

    near.sort(key=room)
    plain = next((each for each in near if not each.selective), None)
    if plain is not None and not plain.blocks:
        near.sort(key=lambda each: each.selective and plain.as_fast_as(each))
    rest = [each for each in candidates if not each.as_fast_as(fastest)]
    return near + sorted(rest, key=lambda each: -each.rate.middle)


def candidate(planner: Planner, option: Option, micro_batch_size: int, blocks: int) -> Candidate:
    """The option at these sizes, accumulated to the global batch that is asked for, and timed."""
    question = planner.question
    accum = accumulation(question, micro_batch_size, option.proposal.strategy.world_size)
    sizes = micro_batch_size, accum, blocks
    if sizes not in option.steps:
        strategy = option.proposal.strategy.settled(
            micro_batch_size=micro_batch_size,
            grad_accum_steps=accum,
            checkpointed_blocks=blocks,
        )
        work, calibration = option.arrangement.work(micro_batch_size, blocks), planner.evidence.calibration(strategy)
        option.steps[sizes] = step_time(work, strategy, question.gpu, question.cluster, calibration)
    return Candidate(option, micro_batch_size, accum, blocks, option.steps[sizes])


def accumulation(question: Question, micro_batch_size: int, world_size: int) -> int:
    """The micro-batches of a step for the global batch that is asked for; one where none is."""
    if question.global_batch_size is None:
        return 1
    return question.global_batch_size // (micro_batch_size * world_size)


def fitting(planner: Planner, option: Option) -> Iterator[Candidate]:
    """At each micro-batch size that fits the GPU and the host, the fewest recomputed blocks with which it does, and the
    quarters beyond, up to all: what leaves more room may be as fast."""
    question, capacity_bytes = planner.question, planner.capacity(option.proposal.strategy)
    pinned = question.pins.checkpointed_blocks
    count = option.arrangement.count
    for size in micro_batch_sizes(question, option.proposal.strategy):
        if pinned is None:
            blocks = option.fewest_blocks(size, capacity_bytes)
        else:
            blocks = count if pinned == "all" else pinned
            blocks = blocks if option.reserved(size, blocks) <= capacity_bytes else None
        if blocks is None or host_bytes(question, option, size, blocks) > question.host_memory_bytes:
            return  # bytes never fall as the micro-batch grows
        more = option.quarters if pinned is None else []
        for each in (blocks, *(quarter for quarter in more if quarter > blocks)):
            yield candidate(planner, option, size, each)


def quarters(count: int) -> list[int]:
    """None to all of so many blocks, in quarters."""
    return sorted({0, count // 4, count // 2, 3 * count // 4, count})


def host_bytes(question: Question, option: Option, micro_batch_size: int, blocks: int) -> int:
    """What a machine's processes are expected to take of its memory at the most."""
    return node_bytes(round(option.arrangement.host(micro_batch_size, blocks)), question.cluster, question.samples)


def micro_batch_sizes(question: Question, strategy: Strategy) -> Iterator[int]:
    """Sizes in order: the pinned one, the divisors of a card's share of the global batch, or all to 32 and then
    ever larger steps. What steps in the backward pass accumulates nothing, and takes its share at once."""
    if question.pins.micro_batch_size is not None:
        yield question.pins.micro_batch_size
        return
    share = None if question.global_batch_size is None else question.global_batch_size // strategy.world_size
    size = share if share is not None and strategy.optimizer_in_backward else 1
    while size <= min(share or LARGEST_MICRO_BATCH, LARGEST_MICRO_BATCH):
        if share is None or share % size == 0:
            yield size
        size += 1 if share is not None or size < 32 else size // 16


def largest_micro_batch(option: Option, blocks: int, capacity_bytes: float) -> int:
    """The largest micro-batch that fits with so many recomputed blocks, to LARGEST_MICRO_BATCH; 0 for none."""
    sizes = range(1, LARGEST_MICRO_BATCH + 1)
    return bisect_left(sizes, True, key=lambda size: option.reserved(size, blocks) > capacity_bytes)


def process(reserved_bytes: int, non_torch: ByteRange, band: Band) -> ByteRange:
    """What the process takes of the GPU: what torch reserves, the band's share of it more at most, and the rest."""
    more = math.ceil(reserved_bytes * band.share)
    return ByteRange(low_bytes=reserved_bytes, high_bytes=reserved_bytes + more) + non_torch


def safe_bytes(gpu: Gpu, non_torch: ByteRange, band: Band) -> int:
    """The most that torch may reserve on the GPU for a step to FIT."""
    return max(int((gpu.usable_bytes - non_torch.high_bytes) / (1 + band.share)), 1)


def verdict_of(taken: ByteRange, usable_bytes: int) -> Verdict:
    """FITS: the most that a process takes is on the GPU. TIGHT: the least is."""
    if taken.high_bytes <= usable_bytes:
        return "FITS"
    return "TIGHT" if taken.low_bytes <= usable_bytes else "DOES NOT FIT"
