"""Options, explored by a few attempts of the whole model each: what they predict by, and which have no chance."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from bigdit.errors import UserError
from bigdit.profile.attempt import Attempt, Counted, StepRequest
from bigdit.search.option import (
    FIRST,
    SECOND,
    Option,
    Policy,
    SizeKey,
    Swapping,
    filling,
    host_peak,
    quarters,
    sample_bytes,
    state_bytes,
)
from bigdit.search.plan import Rejected, node_bytes
from bigdit.search.planner import Failure, Planner
from bigdit.speed.work import work_of
from bigdit.strategy import LEAST_SWAPPED, Strategy
from bigdit.units import gib

OFFLOADED_BYTES = 12
"""Bytes a parameter that AdamW takes at least: an fp32 master and two moments."""


@dataclass(frozen=True)
class FailedOption:
    """An option that could not be run, and why."""

    title: str
    error: Failure

    @property
    def reason(self) -> str:
        return str(self.error).splitlines()[0]


def probe(planner: Planner, strategies: Sequence[Strategy], *, variant: bool = False) -> list[Attempt | Failure]:
    """Attempts for predictions. Work is counted at FIRST, and at all sizes where nothing is recomputed: what
    recomputing adds grows with the samples alone. Each swapped block adds as much. Of a `variant` the update alone is
    counted; packed weights have that of the plain ones that they vary."""

    def counted(request: StepRequest) -> Counted:
        strategy = request.strategy
        packed = variant and strategy.base not in (None, "bf16")
        few = strategy.blocks_to_swap == LEAST_SWAPPED < planner.request.model.block_count
        first = strategy.micro_batch_size == FIRST or strategy.checkpointed_blocks == 0
        if packed or few or not first:
            return "nothing"
        return "update" if variant else "step"

    return planner.unlimited(strategies, counted=counted)


def explore(planner: Planner, proposed: Sequence[Option]) -> list[FailedOption]:
    """Add options, bases before what varies them or explored already; returns those that could not be run."""
    with ThreadPoolExecutor(max(len(proposed), 1)) as aside:  # none waits for another's first attempts
        found = [*aside.map(partial(_attempts_of, planner), proposed)]
    failed, count = [], planner.request.model.block_count
    for option, (strategies, attempts) in zip(proposed, found, strict=True):
        ran = [each for each in attempts if isinstance(each, Attempt)]
        errors = [each for each in attempts if not isinstance(each, Attempt)]
        base = None if option.base is None else planner.options.get(option.base.title)
        if base is None and option.base is not None:
            errors.append(UserError("what it varies could not be run"))
        if errors:
            failed.append(FailedOption(option.title, errors[0]))
            continue
        if base is None:
            none = _policy(option.strategy, strategies[::2], ran[::2])
            full = _policy(option.strategy, strategies[1::2], ran[1::2], none)
        else:
            none, full = (each.varied(option.strategy, base.anchor, ran[0]) for each in (base.none, base.full))
        planner.options.setdefault(option.title, option.predicting(none, full, count, ran[0], base))
    return failed


def _firsts(planner: Planner, option: Option) -> list[Strategy]:
    """With nothing recomputed, and with all blocks. Of what varies another option the state alone is needed, which
    is the same whatever is recomputed, compiled or multiplied in FP8."""
    none, full = (_recomputing(option.strategy, each, FIRST) for each in (0, planner.request.model.block_count))
    plain = none.model_copy(update={"compile_blocks": False, "float8": "none"})
    return [none, full] if option.base is None else [plain]


def _first(planner: Planner, option: Option) -> Attempt | Failure:
    return probe(planner, _firsts(planner, option)[:1], variant=option.base is not None)[0]


def _attempts_of(planner: Planner, option: Option) -> tuple[list[Strategy], list[Attempt | Failure]]:
    """The first attempts of an option; and of a base, one of each at about the largest micro-batch that fits."""
    firsts = _firsts(planner, option)
    ran = probe(planner, firsts, variant=option.base is not None)
    seconds = _seconds(planner, firsts, ran)
    return [*firsts, *seconds], [*ran, *probe(planner, seconds)]


def _seconds(planner: Planner, firsts: Sequence[Strategy], found: Sequence[Attempt | Failure]) -> list[Strategy]:
    """Each at a micro-batch about as large as fits: there predictions are needed."""
    ran = [each for each in found if isinstance(each, Attempt)]
    if len(firsts) == 1 or len(ran) < len(firsts):
        return []
    none, full = map(sample_bytes, ran)
    # A block that is recomputed is there with what its backward pass takes.
    block = max(none - full, 0) / max(planner.request.model.block_count, 1)
    seconds = []
    for strategy, first, sample in zip(firsts, ran, (none, full + 2 * block), strict=True):
        largest = [*planner.micro_batch_sizes(strategy)][-1]
        size = min(filling(first, sample, planner.capacity(strategy)), largest)
        seconds.append(strategy.with_micro_batch_size(max(size, SECOND)))
    return seconds


def hopeful(planner: Planner, group: Sequence[Option]) -> tuple[list[Option], list[Option]]:
    """Engines of the group whose state, with any of their optimizers, leaves anything of the GPU and of a machine's
    memory; and those of which the GPU holds the state, and the machine does not. The others are rejected."""
    request, engines, short = planner.request, list[Option](), list[Option]()
    bases = [each for each in group if each.base is None]
    # Side by side, and cached from here on. A single GPU has one engine as a rule, of which all is explored.
    soon = [each for each in group if not each.strategy.blocks_to_swap] if request.cluster.gpus == 1 else bases
    soon = [each for each in soon if _has_a_chance(planner, each)]
    with ThreadPoolExecutor(max(len(soon), 1)) as aside:
        [*aside.map(partial(_first, planner), soon)]
    for base in bases:
        most = request.gpu.usable_bytes - planner.non_torch(base.strategy).low_bytes
        on_host: dict[str, int] = {}  # of those that the GPU holds
        for each in (each for each in group if base in (each, each.base)):
            if not _has_a_chance(planner, each):
                on_host |= {each.title: _masters(planner, each)} if each.strategy.optimizer_in_cpu_memory else {}
                continue
            found = _first(planner, each)  # where it failed, exploring says why
            state = host_peak(found) if isinstance(found, Attempt) else 0
            host = node_bytes(state, request.cluster, request.samples)
            holds = not isinstance(found, Attempt) or state_bytes(found) <= most
            if holds and host <= request.host_memory_bytes:
                engines.append(base)
                for title, taken in on_host.items():  # with those before, AdamW first, the machine has too little
                    _reject(planner, title, [taken])
                break
            on_host |= {each.title: host} if holds else {}
        else:
            short += [base] if on_host else []
            _reject(planner, base.title, on_host.values())
    return engines, short


def _masters(planner: Planner, option: Option) -> int:
    """What AdamW takes at least of where it is, a machine's memory or a GPU, without an attempt; 0 of others."""
    strategy, request = option.strategy, planner.request
    if strategy.precision == "bf16_sr" or strategy.optimizer.name != "adamw" or strategy.frozen:
        return 0
    nbytes = round(OFFLOADED_BYTES * (request.model.params or 0) / strategy.world_size)
    return node_bytes(nbytes, request.cluster, request.samples) if strategy.optimizer_in_cpu_memory else nbytes


def _has_a_chance(planner: Planner, option: Option) -> bool:
    on_host, request = option.strategy.optimizer_in_cpu_memory, planner.request
    return _masters(planner, option) <= (request.host_memory_bytes if on_host else request.gpu.usable_bytes)


def _reject(planner: Planner, title: str, on_host: Collection[int]) -> None:
    reason = "its state alone takes more than the GPU has"
    if on_host:
        least, memory = gib(min(on_host)), gib(planner.request.host_memory_bytes)
        there = "assumed" if planner.request.host_assumed else "there"
        reason = f"its state alone takes {least} of a machine's memory, and {memory} are {there} (--host-memory)"
    planner.rejected.append(Rejected(choice=title, reason=reason))


def selective(planner: Planner, options: Sequence[Option]) -> None:
    """Add `options`, which share activations, with recomputed blocks that keep matrix products and attention.

    None where the model cannot be run so.
    """
    base, count = options[0], planner.request.model.block_count
    strategy = base.strategy.model_copy(update={"checkpointing": "selective"})
    # What it keeps is between nothing and all: so is the micro-batch that fits.
    sizes = [max(each.reserved) for each in (base.none, base.full)]
    between = max(round(math.sqrt(sizes[0] * sizes[1])), SECOND)
    strategies = [_recomputing(strategy, count, size) for size in (FIRST, between)]
    ran = [each for each in probe(planner, strategies) if isinstance(each, Attempt)]
    if len(ran) < 2:
        return
    kept = _policy(strategy, strategies, ran, base.none)
    for option in options:
        full = kept if option is base else kept.varied(option.strategy, base.anchor, option.anchor)
        checkpointing = option.strategy.model_copy(update={"checkpointing": "selective"})
        made = Option(f"{option.title}, selective", checkpointing, option.base, option.last_resort)
        planner.options[made.title] = made.predicting(option.none, full, option.count, option.anchor, option)


def swapped(planner: Planner, group: Sequence[Option]) -> list[FailedOption]:
    """For each of the group that swaps blocks, add options that swap the fewest with which anything fits, and
    quarters of all beyond these; with their bases that were not explored. Returns what could not be run."""
    failed = list[FailedOption]()
    for option in group:
        if option.base is None or not option.strategy.blocks_to_swap:
            continue
        alone = (option.base.base or option.base).strategy  # an EMA is as large, whatever is swapped
        if option.base.title not in planner.options:
            failed += explore(planner, [Option(option.base.title, option.base.strategy, None, option.base.last_resort)])
        moved = _swapping(planner, alone, option.strategy.blocks_to_swap)
        if not isinstance(moved, Swapping):
            failed.append(FailedOption(option.title, moved))
        elif option.base.title in planner.options:
            planner.options |= {each.title: each for each in _numbers(planner, option, moved)}
    return failed


def _swapping(planner: Planner, strategy: Strategy, most: int) -> Swapping | Failure:
    """What swapped blocks spare, from attempts with all blocks recomputed."""
    least, recomputed = min(LEAST_SWAPPED, most), _recomputing(strategy, planner.request.model.block_count, FIRST)
    places = [recomputed.model_copy(update={"blocks_to_swap": blocks}) for blocks in (0, least, most)]
    ran = []
    for each in probe(planner, places):
        if not isinstance(each, Attempt):
            return each
        ran.append(each)
    none, few, every = ran
    work = work_of(every.work, places[2]) - work_of(none.work, places[0])
    return Swapping(least, most, none, few, every, work * (1 / most))


def _numbers(planner: Planner, option: Option, moved: Swapping) -> list[Option]:
    """The fewest with which the smallest micro-batch fits where all that may be is recomputed, or all that may be
    swapped; and the quarters beyond."""
    assert option.base is not None
    base, room = planner.options[option.base.title], planner.capacity(option.strategy)
    count, most = base.count, option.strategy.blocks_to_swap
    recomputed = count if planner.request.constraints.checkpointed_blocks in (None, "all") else most
    corrections: dict[SizeKey, float] = {}  # their own: those of packed weights say nothing of these
    least = next(planner.micro_batch_sizes(option.strategy), 1)

    def swapping(first: int) -> Option:
        title = f"{base.title}, weights of {first} of {count} blocks in CPU memory"
        strategy = option.strategy.model_copy(update={"blocks_to_swap": first})
        none, full = (moved.of(each, first) for each in (base.none, base.full))
        made = Option(title, strategy, option.base, option.last_resort, corrections)
        return made.predicting(none, full, count, base.anchor)

    numbers = range(LEAST_SWAPPED, most)
    fewest = bisect_left(numbers, True, key=lambda first: swapping(first).reserved(least, recomputed) <= room)
    first = LEAST_SWAPPED + fewest
    return [swapping(each) for each in sorted({first, *(each for each in quarters(count) if first < each <= most)})]


def _policy(
    strategy: Strategy, strategies: Sequence[Strategy], ran: Sequence[Attempt], none: Policy | None = None
) -> Policy:
    sizes = (each.micro_batch_size for each in strategies)
    return Policy.of(strategy, dict(zip(sizes, ran, strict=True)), none)


def _recomputing(strategy: Strategy, blocks: int, micro_batch_size: int) -> Strategy:
    return strategy.with_micro_batch_size(micro_batch_size).model_copy(update={"checkpointed_blocks": blocks})
