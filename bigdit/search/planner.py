"""The planner of a request: estimates of its strategies, the results of emulated GPUs, and the order of estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

from bigdit.catalog import Gpu
from bigdit.config.plan_file import LargestMicroBatch
from bigdit.config.strategy_text import LARGEST_MICRO_BATCH
from bigdit.memory.process import ByteRange, non_torch_memory_of
from bigdit.profile.attempt import Attempt, AttemptJob, Counted, Profile, StepRequest, request_for
from bigdit.profile.gpus import EmulatedGpus, Row
from bigdit.search.calibration import UNPROVED, Calibration
from bigdit.search.option import Option
from bigdit.search.plan import (
    Estimate,
    HostNeed,
    Rejected,
    ResolvedRequest,
    host_need,
    node_bytes,
    process,
    safe_bytes,
    verdict_of,
)
from bigdit.speed.seconds import Launches, StepTime, launches_of
from bigdit.speed.step import step_time
from bigdit.speed.work import Work, work_of
from bigdit.strategy import Strategy
from bigdit.units import how_many

SAME_SPEED = 0.05
"""Strategies within this share of the fastest one's speed, at both ends of their intervals, count as equally fast.
Smaller differences mean nothing between bounds that are a factor of two to three apart."""

SAME_ROOM = UNPROVED.share
"""Bytes within this share of each other count as equal: real GPUs are not known better. No block is recomputed to save
less."""

RECORDED_ACCUMULATION = 2
"""Most micro-batches of a step in an attempt: from the second on, all take the same memory."""

NEAR = 0.05
"""Sizes whose area is within this share of the planned one fit about as many samples. With nothing and with all blocks
recomputed, their limits are not searched."""

CLEARLY = 0.75
"""A micro-batch that lacks more than a quarter of its last sample does not fit with larger samples either."""

Failure = Exception
"""Why an attempt has no answer."""

Limits = dict[tuple[int, int], LargestMicroBatch]
"""By size in pixels."""


class Progress:
    """The progress of a plan: its stage, and in parentheses the number of attempts so far, and the best that fits."""

    def __init__(self, what: str = "", say: Callable[[str], None] = lambda line: None) -> None:
        self._what, self._say, self._stage, self._found = what, say, "", ""

    def begin(self, stage: str) -> None:
        self._stage = stage
        self._say(f"{self._what}: {stage}")

    def count(self, attempts: int) -> None:
        self._say(f"{self._what}: {self._stage} ({how_many(attempts, 'attempt')}{self._found})")

    def fits(self, best: Estimate) -> None:
        self._found = f"; fits: {best.title}"


@dataclass
class Planner:
    """A `request`, the emulated GPUs, what receipts say, and what the search found.

    `options` were explored; `rejected` are choices with reasons. By the titles of estimates: `launches` of those that
    ran, `profiles` of those that were recorded, and `limits`, the largest micro-batches of those that may be the best.
    `passed_over` is the lossless estimate that a much faster one replaced.
    """

    request: ResolvedRequest
    gpus: EmulatedGpus
    calibration: Calibration
    progress: Progress = field(default_factory=Progress)
    options: dict[str, Option] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    launches: dict[str, Launches | None] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    limits: dict[str, Limits] = field(default_factory=dict)
    passed_over: Estimate | None = None

    def about(self, request: ResolvedRequest) -> Planner:
        """A planner of another request with the same GPUs and receipts."""
        return Planner(request, self.gpus, self.calibration, self.progress)

    def step_request(self, strategy: Strategy, resolution: tuple[int, int] | None = None) -> StepRequest:
        """Steps of `strategy`, with only as many micro-batches as memory depends on."""
        if strategy.checkpointed_blocks == 0:  # nothing is recomputed, so its kind makes no other cache entry
            strategy = strategy.model_copy(update={"checkpointing": "full", "checkpointed_segments": None})
        fewer = min(strategy.grad_accum_steps, RECORDED_ACCUMULATION)
        strategy = strategy.model_copy(update={"grad_accum_steps": fewer})
        repeated = min(strategy.repeated_samples, strategy.places - 1, 1)  # one is enough for a batch to have weights
        strategy = strategy.model_copy(update={"repeated_samples": repeated})
        request = self.request
        size = resolution or request.resolution
        return request_for(request.model, request.gpu, strategy, resolution=size, frames=request.frames)

    def unlimited(
        self, strategies: Sequence[Strategy], counted: Iterable[Counted] = repeat("nothing")
    ) -> list[Attempt | Failure]:
        """An attempt of each, in parallel, on a GPU without a memory limit; cached. `counted`: the work, for each."""
        pairs = zip(strategies, counted, strict=False)
        return self.gpus.attempts([AttemptJob(request=self.step_request(each), counted=work) for each, work in pairs])

    def attempts_of(self, predicted: Sequence[Estimate]) -> list[Attempt | Failure]:
        """As `unlimited`. Work over quantised weights is counted: predictions leave out that they are unpacked."""
        strategies = [each.strategy for each in predicted]
        return self.unlimited(strategies, ["step" if each.packed else "nothing" for each in strategies])

    def non_torch(self, strategy: Strategy) -> ByteRange:
        """GPU memory of the process outside torch."""
        return non_torch_memory_of(strategy, self.request.gpu)

    def capacity(self, strategy: Strategy) -> int:
        """The most bytes that torch may reserve for the strategy to FIT."""
        return safe_bytes(self.request.gpu, self.non_torch(strategy), self.calibration.margin)

    def accumulation(self, micro_batch_size: int, strategy: Strategy) -> int:
        """Micro-batches per step for the requested global batch; 1 if none is requested, or a step has only one."""
        if strategy.optimizer_in_backward:
            return 1
        return -(-(self.request.share(strategy.dp) or 1) // micro_batch_size)

    def micro_batch_sizes(self, strategy: Strategy) -> Iterator[int]:
        """Sizes in ascending order: the fixed one; or divisors of a GPU's share of the global batch; or all up to 32,
        then in growing steps. Where samples are repeated anyway: sizes that need no more repeats than necessary. An
        optimizer in the backward pass cannot accumulate, and takes the whole share at once."""
        request = self.request
        if request.constraints.micro_batch_size is not None:
            yield request.constraints.micro_batch_size
            return
        share, repeats = request.share(strategy.dp), (request.global_batch_size or 0) % strategy.dp
        size = share if share is not None and strategy.optimizer_in_backward else 1
        while size <= min(share or LARGEST_MICRO_BATCH, LARGEST_MICRO_BATCH):
            if share is None or share % size == 0 or (repeats and (size - 1) * -(-share // size) < share):
                yield size
            size += 1 if share is not None or size < 32 else size // 16

    # Estimates: predicted, run, recorded.

    def estimate(self, option: Option, micro_batch_size: int, blocks: int, accumulated: int | None = None) -> Estimate:
        """The option's prediction at these sizes; `accumulated` micro-batches, or as many as the global batch needs."""
        if accumulated is None:
            accumulated = self.accumulation(micro_batch_size, option.strategy)
        sizes, reserved = (micro_batch_size, accumulated, blocks), round(option.reserved(micro_batch_size, blocks))
        found = option.predicted.get(sizes)
        if found is None:
            found = option.predicted[sizes] = self._estimate(option, *sizes, reserved)
        if found.peak_reserved_bytes != reserved:  # corrected since
            found = found.model_copy(update=self.reserving(reserved, found.non_torch))
        return found

    def _estimate(
        self, option: Option, micro_batch_size: int, accumulated: int, blocks: int, reserved_bytes: int
    ) -> Estimate:
        strategy = option.strategy.settled(
            micro_batch_size=micro_batch_size,
            grad_accum_steps=accumulated,
            checkpointed_blocks=blocks,
            global_batch_size=self.request.global_batch_size,
        )
        phases = {phase: round(nbytes) for phase, nbytes in option.peaks(micro_batch_size, blocks).items()}
        non_torch = self.non_torch(strategy)
        launches = option.launches(blocks, self.step_request(option.strategy).strategy.grad_accum_steps)
        return Estimate(
            option=option.title,
            title=option.titled(micro_batch_size, blocks),
            strategy=strategy,
            source="predicted",
            phases=phases,
            peak_allocated_bytes=max(phases.values()),
            non_torch=non_torch,
            host_bytes=self.host_bytes(option, micro_batch_size, blocks),
            lossless=option.lossless,
            **self.reserving(reserved_bytes, non_torch),
            **speed_fields(strategy, self.step(strategy, option.work(micro_batch_size, blocks), launches=launches)),
        )

    def reserving(self, reserved_bytes: int, non_torch: ByteRange) -> dict[str, Any]:
        """The fields of an estimate that depend on reserved bytes."""
        usable, taken = self.request.usable_bytes, process(reserved_bytes, non_torch, self.calibration.margin)
        return {
            "peak_reserved_bytes": reserved_bytes,
            "process": taken,
            "verdict": verdict_of(taken, usable),
            "headroom_bytes": usable - taken.high_bytes,
        }

    def ran(self, each: Estimate, attempt: Attempt, asked: Strategy) -> Estimate:
        """The predicted estimate with the bytes of an attempt of `asked`, and seconds from its counted launches."""
        micro_batches = self.step_request(asked).strategy.grad_accum_steps
        launches = self.launches[each.title] = launches_of(attempt.launched, micro_batches)
        work = self.options[each.option].work(each.micro_batch_size, each.blocks)
        work = work_of(attempt.work, asked) if attempt.packed_work else work
        found = {
            "source": "ran",
            "phases": attempt.peaks,
            "peak_allocated_bytes": max(attempt.peaks.values()),
            **self.reserving(attempt.peak_reserved_bytes, each.non_torch),
            **speed_fields(each.strategy, self.step(each.strategy, work, launches=launches)),
        }
        return each.model_copy(update=found)

    def run(self, predicted: Sequence[Estimate]) -> list[Estimate | None]:
        """Run each on a GPU without a limit. None for a failed attempt. Predictions of the options are corrected.

        FITS: torch reserved no more than the GPU has with the margin. TIGHT: no more than it may have.
        """
        found: list[Estimate | None] = []
        for each, attempt in zip(predicted, self.attempts_of(predicted), strict=True):
            if not isinstance(attempt, Attempt) or not attempt.ran:
                found.append(None)
                continue
            self.options[each.option].correct(each.micro_batch_size, each.blocks, attempt.peak_reserved_bytes)
            found.append(self.ran(each, attempt, each.strategy))
        return found

    def within_limit(self, ran: Iterable[Estimate | None]) -> list[Estimate]:
        """The estimates, of which those that do not fit ran again within a limit: TIGHT if freed memory sufficed."""
        known = {each.title: each for each in ran if each is not None}
        most = {each.title: self.request.usable_bytes - each.non_torch.low_bytes for each in known.values()}
        larger = [each for each in known.values() if each.peak_reserved_bytes > most[each.title]]
        requests = [(self.step_request(each.strategy), max(most[each.title], 1)) for each in larger]
        jobs = [AttemptJob(request=request, capacity_bytes=nbytes) for request, nbytes in requests]
        for each, last in zip(larger, self.gpus.attempts(jobs), strict=True):
            if isinstance(last, Attempt) and last.ran:
                within = self.reserving(last.peak_reserved_bytes, each.non_torch) | {"verdict": "TIGHT"}
                known[each.title] = each.model_copy(update=within)
        return [*known.values()]

    def record(self, ran: Estimate) -> Estimate:
        """The estimate that ran, with seconds and CPU memory as recorded. Raises UserError and WorkerError if recording
        fails."""
        profile = self.profiles[ran.title] = self.gpus.profile(self.step_request(ran.strategy))
        nbytes = self.host(profile).node_bytes
        verdict = "DOES NOT FIT" if self.request.short_of_host(nbytes) else ran.verdict
        found = {"source": "recorded", "host_bytes": nbytes, "verdict": verdict}
        return ran.model_copy(update=found | speed_fields(ran.strategy, self.recorded_step(ran)))

    def step(
        self, strategy: Strategy, work: Work, gpu: Gpu | None = None, launches: Launches | None = None
    ) -> StepTime:
        """The time of a step on the request's GPUs, calibrated by receipts; or on another `gpu`, not calibrated."""
        ratio = self.calibration.ratio(strategy) if gpu in (None, self.request.gpu) else None
        return step_time(work, strategy, gpu or self.request.gpu, self.request.cluster, ratio, launches)

    def recorded_step(self, recorded: Estimate, gpu: Gpu | None = None) -> StepTime:
        """The time of the same kernels; on another `gpu` as in `step`."""
        work = work_of(self.profiles[recorded.title].timeline, recorded.strategy)
        return self.step(recorded.strategy, work, gpu, self.launches[recorded.title])

    def host(self, profile: Profile) -> HostNeed:
        """CPU memory of a machine whose processes did as recorded."""
        cluster, samples = self.request.cluster, self.request.samples
        return host_need(profile.host_timeline, profile.checkpoint_bytes, cluster, samples)

    def host_bytes(self, option: Option, micro_batch_size: int, blocks: int) -> int:
        """Predicted peak CPU memory of a machine's processes."""
        nbytes = round(option.host(micro_batch_size, blocks))
        return node_bytes(nbytes, self.request.cluster, self.request.samples)

    def fitting(self, option: Option) -> Iterator[Estimate]:
        """Estimates at each micro-batch size that fits GPU and CPU memory: with the fewest recomputed blocks that fit,
        and with each quarter beyond, up to all, which may be as fast with more memory to spare."""
        capacity_bytes, fixed = self.capacity(option.strategy), self.request.constraints.checkpointed_blocks
        for size in self.micro_batch_sizes(option.strategy):
            if fixed is None:
                blocks = option.fewest_blocks(size, capacity_bytes)
            else:
                blocks = option.count if fixed == "all" else fixed
                blocks = blocks if option.reserved(size, blocks) <= capacity_bytes else None
            if blocks is None or self.host_bytes(option, size, blocks) > self.request.host_memory_bytes:
                return  # bytes never fall as the micro-batch grows
            more = option.quarters if fixed is None else []
            for each in (blocks, *(quarter for quarter in more if quarter > blocks)):
                if each or option.strategy.checkpointing == "full":  # else it is the option without that kind
                    yield self.estimate(option, size, each)

    def preferred(self, estimates: Iterable[Estimate]) -> list[Estimate]:
        """Estimates in order of preference. Lossless ones come first, since numerics change only on request; then those
        without a last resort.

        Among those as fast as the fastest: without context parallelism first; then the fewest swapped blocks, since
        copies take CPU memory and PCIe; then the least memory; at equal memory (to SAME_ROOM) the fewest recomputed
        blocks. All others follow by speed. Where nothing must be recomputed, selective checkpointing comes first only
        if it is clearly faster: no real GPU has shown smaller gains.
        """
        groups: dict[tuple[bool, int], list[Estimate]] = {}
        for each in estimates:
            groups.setdefault((not each.lossless, self.options[each.option].last_resort), []).append(each)
        return [each for _, group in sorted(groups.items()) for each in _by_preference(group)]

    def ranked(self, options: Iterable[Option] | None = None) -> list[Estimate]:
        """The best estimate of each option in which something fits, best first; then the second best of each."""
        every = self.options.values() if options is None else options
        best, second = dict[str, Estimate](), dict[str, Estimate]()
        for each in self.preferred(each for option in every for each in self.fitting(option)):
            (second if each.option in best else best).setdefault(each.option, each)
        return [*best.values(), *second.values()]

    def find_limits(self, chosen: Estimate, parallel: Callable[[], Iterable[Callable[[], object]]] = tuple) -> None:
        """Add the largest micro-batches of each size to `limits`, without sizes where an attempt failed. The planned
        size comes first, and the others start from its result. `parallel` returns further calls to make with them."""
        columns = {"none": 0, "recommended": chosen.blocks, "full": self.options[chosen.option].count}
        ran: dict[int, dict[tuple[int, int], int | None]] = {blocks: {} for blocks in columns.values()}
        searches = [self._search(chosen, blocks, found) for blocks, found in ran.items()]
        sizes = (self.request.resolution, *self.request.buckets)
        for more in (tuple, parallel):
            self.gpus.apart(lambda run: run(), [*(partial(next, each, None) for each in searches), *more()])
            found = {size: {column: ran[blocks].get(size) for column, blocks in columns.items()} for size in sizes}
            self.limits[chosen.title] = {
                size: LargestMicroBatch.model_validate({"height": size[0], "width": size[1], **limits})
                for size, limits in found.items()
                if limits["recommended"] is not None
            }

    def _search(self, chosen: Estimate, blocks: int, limits: dict[tuple[int, int], int | None]) -> Iterator[None]:
        """Add the largest micro-batch of each size, with so many recomputed blocks; the others after a pause."""
        request, option, capacity_bytes = self.request, self.options[chosen.option], self.capacity(chosen.strategy)
        sizes, planned = (request.resolution, *request.buckets), math.prod(request.resolution)
        if blocks < option.strategy.blocks_to_swap:
            limits |= dict.fromkeys(sizes, 0)
            yield
            return
        expected = option.largest(blocks, capacity_bytes)
        half = max(expected, 2) / 2
        sample_bytes = (option.reserved(2 * half, blocks) - option.reserved(half, blocks)) / half
        pixel_bytes = max(sample_bytes, 1) / planned
        failed: dict[int, int] = {}  # micro-batches that clearly do not fit, by the area of a sample

        def steps(size: tuple[int, int], micro_batch_size: int) -> StepRequest:
            update = {"micro_batch_size": micro_batch_size, "checkpointed_blocks": blocks}
            return self.step_request(chosen.strategy.model_copy(update=update), size)

        def search(some: Sequence[tuple[int, int]], pixels: float) -> float:
            for size in some:
                known = option.ran(blocks) if size == request.resolution else {}
                area = math.prod(size)
                failing = min((failed[each] for each in [*failed] if each <= area), default=LARGEST_MICRO_BATCH + 1)
                row = Row(partial(steps, size), pixels / area, pixel_bytes * area, known, failing)
                found = self.gpus.largest(row, capacity_bytes)
                limits[size] = None if found is None else int(found[0])
                if found is not None:
                    pixels = found[0] * area
                    if found[0] % 1 < CLEARLY:
                        failed[area] = int(found[0]) + 1
                    if size == request.resolution:
                        option.note(blocks, found[1])
            return pixels

        pixels = search(sizes[:1], float(expected * planned))
        yield
        searched = [size for size in sizes if blocks == chosen.blocks or abs(math.prod(size) / planned - 1) > NEAR]
        # Height and width swapped, a sample takes the same bytes.
        turned = {size: next(each for each in sizes if each in (size, size[::-1])) for size in searched}
        others = [*dict.fromkeys(each for each in turned.values() if each != sizes[0])]
        self.gpus.apart(search, (others[::2], others[1::2]), (pixels, pixels))
        limits |= {size: limits[first] for size, first in turned.items() if first in limits}


def speed_fields(strategy: Strategy, step: StepTime) -> dict[str, Any]:
    """The fields of an estimate that depend on the time of a step."""
    samples = step.seconds.per(strategy.global_batch_size / strategy.world_size)
    return {"step": step, "samples_per_second_per_gpu": samples}


def as_fast_as(one: Estimate, other: Estimate) -> bool:
    """Whether `one` is at least as fast as the other, to SAME_SPEED."""
    mine, theirs, least = one.samples_per_second_per_gpu, other.samples_per_second_per_gpu, 1 - SAME_SPEED
    return mine.low >= least * theirs.low and mine.high >= least * theirs.high


def rate(each: Estimate) -> float:
    """Samples per second of one GPU, the middle of the interval."""
    return each.samples_per_second_per_gpu.middle


def _by_preference(estimates: Sequence[Estimate]) -> list[Estimate]:
    fastest = max(estimates, key=rate)
    near = [each for each in estimates if as_fast_as(each, fastest)]
    alone = [each for each in near if each.strategy.cp == 1]
    least = min(each.peak_reserved_bytes for each in alone or near)

    def room(each: Estimate) -> tuple[bool, int, float, int, float]:
        as_much = each.peak_reserved_bytes <= least * (1 + SAME_ROOM)
        nbytes = least if as_much else each.peak_reserved_bytes
        return each.strategy.cp > 1, each.strategy.blocks_to_swap, nbytes, each.blocks, each.peak_reserved_bytes

    def selective(each: Estimate) -> bool:
        return each.strategy.checkpointing == "selective" and each.blocks > 0

    near.sort(key=room)
    plain = next((each for each in near if not selective(each)), None)
    if plain is not None and not plain.blocks:
        near.sort(key=lambda each: selective(each) and as_fast_as(plain, each))
    rest = [each for each in estimates if not as_fast_as(each, fastest)]
    return near + sorted(rest, key=lambda each: -rate(each))
