"""Proposals become options: a few attempts of the whole model each, on a GPU without a limit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from bigdit.config.plan_file import LargestMicroBatch
from bigdit.profile.attempt import UNLIMITED, Attempt, Counted, StepRequest
from bigdit.profile.cards import Row
from bigdit.search.candidates import Candidate, Option, Planner, largest_micro_batch, micro_batch_sizes, quarters
from bigdit.search.plan import Rejected, node_bytes
from bigdit.search.predict import (
    FIRST,
    SECOND,
    Arrangement,
    Policy,
    Swapping,
    filling,
    host_peak,
    policy,
    sample_bytes,
    state_bytes,
    varied,
)
from bigdit.search.space import Proposal
from bigdit.speed.work import work_of
from bigdit.strategy import LEAST_SWAPPED, Strategy
from bigdit.units import gib

Failure = Exception
"""Why an attempt has no answer."""


def attempts(planner: Planner, strategies: Sequence[Strategy], *, variant: bool = False) -> list[Attempt | Failure]:
    """An attempt of each, side by side, on a GPU without a limit; cached. Work is counted at FIRST, and at all sizes
    where nothing is recomputed: what recomputing adds grows with the samples alone. Packed weights have the optimizer's
    work of plain ones, and each swapped block adds as much. Of a `variant` the update alone is counted."""

    def counted(request: StepRequest) -> Counted:
        strategy = request.strategy
        packed = strategy.lora is not None and strategy.lora.base != "bf16"
        few = strategy.blocks_to_swap == LEAST_SWAPPED < planner.question.model.block_count
        first = strategy.micro_batch_size == FIRST or strategy.checkpointed_blocks == 0
        if packed or few or not first:
            return "nothing"
        return "update" if variant else "step"

    return planner.cards.attempts([(planner.request(each), UNLIMITED) for each in strategies], counted=counted)


def explore(
    planner: Planner, proposed: Sequence[Proposal], known: Sequence[Option] = ()
) -> tuple[list[Option], list[Rejected]]:
    """An option for each proposal, bases standing before what varies them or being among the `known`; and those that
    could not be run."""
    with ThreadPoolExecutor(max(len(proposed), 1)) as aside:  # none waits for another's first attempts
        ran = [*aside.map(partial(_attempts_of, planner), proposed)]
    bases = {option.proposal.title: option for option in known}
    options, rejected = [], []
    for proposal, attempted in zip(proposed, ran, strict=True):
        base = None if proposal.base is None else bases.get(proposal.base.title)
        made = _option(planner, proposal, base, attempted)
        if isinstance(made, str):
            rejected.append(Rejected(choice=proposal.title, reason=made))
        else:
            options.append(bases.setdefault(proposal.title, made if base is None else base.like(made)))
    return options, rejected


def _firsts(planner: Planner, proposal: Proposal) -> list[Strategy]:
    """With nothing recomputed, and with all blocks. Of what varies another proposal the state alone is wanted, which is
    the same whatever is recomputed."""
    none, full = (_recomputing(proposal.strategy, blocks, FIRST) for blocks in (0, planner.question.model.block_count))
    return [none, full] if proposal.base is None else [none]


def _first(planner: Planner, proposal: Proposal) -> Attempt | Failure:
    return attempts(planner, _firsts(planner, proposal)[:1], variant=proposal.base is not None)[0]


def _attempts_of(planner: Planner, proposal: Proposal) -> list[tuple[Strategy, Attempt | Failure]]:
    """The first attempts of a proposal; and of a base, one of each at about the largest micro-batch that fits."""
    firsts = _firsts(planner, proposal)
    ran = attempts(planner, firsts, variant=proposal.base is not None)
    seconds = _seconds(planner, firsts, ran)
    return list(zip([*firsts, *seconds], [*ran, *attempts(planner, seconds)], strict=True))


def _seconds(planner: Planner, firsts: Sequence[Strategy], found: Sequence[Attempt | Failure]) -> list[Strategy]:
    """Each at a micro-batch about as large as fits: there predictions are wanted."""
    ran = [each for each in found if isinstance(each, Attempt)]
    if len(firsts) == 1 or len(ran) < len(firsts):
        return []
    none, full = map(sample_bytes, ran)
    # A block that is recomputed is there with what its backward pass takes beside it.
    block = max(none - full, 0) / max(planner.question.model.block_count, 1)
    seconds = []
    for strategy, first, sample in zip(firsts, ran, (none, full + 2 * block), strict=True):
        largest = [*micro_batch_sizes(planner.question, strategy)][-1]
        size = min(filling(first, sample, planner.capacity(strategy)), largest)
        seconds.append(strategy.with_micro_batch_size(max(size, SECOND)))
    return seconds


def _option(
    planner: Planner, proposal: Proposal, base: Option | None, found: Sequence[tuple[Strategy, Attempt | Failure]]
) -> Option | str:
    """The option, or why it could not be run."""
    strategies, ran = [each for each, _ in found], []
    for _, each in found:
        if not isinstance(each, Attempt):
            return str(each).splitlines()[0]
        ran.append(each)
    if proposal.base is not None and base is None:
        return "what it varies could not be run"
    if base is not None:
        return Option(proposal, _varied(base, proposal, ran), anchor=ran[0])
    none = _policy(proposal.strategy, strategies[::2], ran[::2])
    full = _policy(proposal.strategy, strategies[1::2], ran[1::2], none)
    return Option(proposal, Arrangement(none, full, planner.question.model.block_count), anchor=ran[0])


def _policy(
    strategy: Strategy, strategies: Sequence[Strategy], ran: Sequence[Attempt], none: Policy | None = None
) -> Policy:
    return policy(strategy, {each.micro_batch_size: found for each, found in zip(strategies, ran, strict=True)}, none)


def _varied(base: Option, proposal: Proposal, ran: Sequence[Attempt]) -> Arrangement:
    none, full = (
        varied(each, proposal.strategy, base.anchor, ran[0]) for each in (base.arrangement.none, base.arrangement.full)
    )
    return replace(base.arrangement, none=none, full=full)


@dataclass(frozen=True)
class Hopes:
    """The engines of a group whose state, with any of their optimizers, leaves anything of the GPU and of the machine's
    memory; those for which it is the machine that has too little; and why the others are not looked at."""

    engines: list[Proposal]
    short_of_host: list[Proposal]
    rejected: list[Rejected]


def hopeful(planner: Planner, group: Sequence[Proposal]) -> Hopes:
    """What of the group is worth exploring, by what has neither activations nor batches."""
    question = planner.question
    bases = [each for each in group if each.base is None]
    if question.cluster.gpus == 1:  # as a rule one engine, all of whose optimizers are explored
        soon = [each for each in group if not each.strategy.blocks_to_swap]
        with ThreadPoolExecutor(max(len(soon), 1)) as aside:
            [*aside.map(partial(_first, planner), soon)]  # cached from here on
    else:
        attempts(planner, [_firsts(planner, each)[0] for each in bases])  # side by side, and cached
    hopes = Hopes([], [], [])
    for base in bases:
        most = question.gpu.usable_bytes - planner.non_torch(base.strategy).low_bytes
        on_host: dict[str, int] = {}  # of those that the GPU holds
        for each in (each for each in group if base in (each, each.base)):
            found = _first(planner, each)
            host = node_bytes(_host_state(found), question.cluster, question.samples)
            holds = not isinstance(found, Attempt) or state_bytes(found) <= most
            if holds and host <= question.host_memory_bytes:
                hopes.engines.append(base)
                for title, taken in on_host.items():  # with those before, AdamW first, the machine has too little
                    hopes.rejected.append(Rejected(choice=title, reason=_why(planner, [taken])))
                break
            on_host |= {each.title: host} if holds else {}
        else:
            hopes.short_of_host.extend([base] if on_host else [])
            hopes.rejected.append(Rejected(choice=base.title, reason=_why(planner, on_host.values())))
    return hopes


def _host_state(found: Attempt | Failure) -> int:
    """0 where the attempt failed: exploring says why."""
    return host_peak(found) if isinstance(found, Attempt) else 0


def _why(planner: Planner, on_host: Collection[int]) -> str:
    if not on_host:
        return "its state alone takes more than the GPU has"
    least, memory = gib(min(on_host)), gib(planner.question.host_memory_bytes)
    there = "assumed" if planner.question.host_assumed else "there"
    return f"its state alone takes {least} of a machine's memory, and {memory} are {there} (--host-memory)"


def selective(planner: Planner, options: Sequence[Option]) -> list[Option]:
    """`options`, which share activations, with recomputed blocks that keep matrix products and attention.

    None where the model cannot be run so.
    """
    base = options[0]
    strategy = base.proposal.strategy.model_copy(update={"checkpointing": "selective"})
    # What it keeps is between nothing and all: so is the micro-batch that fits.
    sizes = [max(each.reserved) for each in (base.arrangement.none, base.arrangement.full)]
    between = max(round(math.sqrt(sizes[0] * sizes[1])), SECOND)
    count = planner.question.model.block_count
    strategies = [_recomputing(strategy, count, size) for size in (FIRST, between)]
    ran = [each for each in attempts(planner, strategies) if isinstance(each, Attempt)]
    if len(ran) < 2:
        return []
    kept, found = _policy(strategy, strategies, ran, base.arrangement.none), []
    for option in options:
        full = kept if option is base else varied(kept, option.proposal.strategy, base.anchor, option.anchor)
        proposal = replace(
            option.proposal,
            title=f"{option.proposal.title}, selective",
            strategy=option.proposal.strategy.model_copy(update={"checkpointing": "selective"}),
        )
        made = Option(proposal, replace(option.arrangement, full=full), anchor=option.anchor)
        found.append(option.like(made))
    return found


def swapped(
    planner: Planner, group: Sequence[Proposal], known: Sequence[Option]
) -> tuple[list[Option], list[Rejected]]:
    """For each proposal of the group that swaps blocks, options that swap the fewest with which anything fits, and
    quarters of all beyond these; with their bases that were not among the `known`."""
    found, rejected = [*known], list[Rejected]()
    for proposal in group:
        if proposal.base is None or not proposal.strategy.blocks_to_swap:
            continue
        if all(each.proposal.title != proposal.base.title for each in found):
            made, failed = explore(planner, [replace(proposal.base, base=None)])
            found, rejected = [*found, *made], [*rejected, *failed]
        alone = (proposal.base.base or proposal.base).strategy  # an EMA is as large, whatever is swapped
        moved = _swapping(planner, alone, proposal.strategy.blocks_to_swap)
        if isinstance(moved, Exception):
            rejected.append(Rejected(choice=proposal.title, reason=str(moved).splitlines()[0]))
            continue
        for base in [each for each in found if each.proposal.title == proposal.base.title]:
            found += _numbers(planner, proposal, base, moved)
    return found[len(known) :], rejected


def _swapping(planner: Planner, strategy: Strategy, most: int) -> Swapping | Failure:
    """What swapped blocks spare, from attempts with all blocks recomputed."""
    least = min(LEAST_SWAPPED, most)
    places = [
        _recomputing(strategy, planner.question.model.block_count, FIRST).model_copy(update={"blocks_to_swap": blocks})
        for blocks in (0, least, most)
    ]
    ran = []
    for each in attempts(planner, places):
        if not isinstance(each, Attempt):
            return each
        ran.append(each)
    none, few, every = ran
    work = work_of(every.work, places[2]) - work_of(none.work, places[0])
    return Swapping(least, most, none, few, every, work * (1 / most))


def _numbers(planner: Planner, proposal: Proposal, base: Option, moved: Swapping) -> list[Option]:
    """The fewest with which the smallest micro-batch fits where all that may be is recomputed, or all that may be
    swapped; and the quarters beyond."""
    question = planner.question
    count, most, room = base.arrangement.count, proposal.strategy.blocks_to_swap, planner.capacity(proposal.strategy)
    recomputed = count if question.pins.checkpointed_blocks in (None, "all") else most
    corrections: dict[tuple[str, int, int], float] = {}  # their own: those of packed weights say nothing of these
    least = next(micro_batch_sizes(question, proposal.strategy), 1)

    def option(first: int) -> Option:
        title = f"{base.proposal.title}, {first} of {count} blocks' weights on the host"
        strategy = proposal.strategy.model_copy(update={"blocks_to_swap": first})
        none, full = (moved.of(each, first) for each in (base.arrangement.none, base.arrangement.full))
        named = replace(proposal, title=title, strategy=strategy)
        return Option(named, replace(base.arrangement, none=none, full=full), corrections, anchor=base.anchor)

    numbers = range(LEAST_SWAPPED, most)
    fewest = bisect_left(numbers, True, key=lambda first: option(first).reserved(least, recomputed) <= room)
    first = LEAST_SWAPPED + fewest
    return [option(each) for each in sorted({first, *(each for each in quarters(count) if first < each <= most)})]


def _recomputing(strategy: Strategy, blocks: int, micro_batch_size: int) -> Strategy:
    return strategy.with_micro_batch_size(micro_batch_size).model_copy(update={"checkpointed_blocks": blocks})


Limits = dict[tuple[int, int], LargestMicroBatch]
"""By the size in pixels."""

NEAR = 0.05
"""Of a size whose area is within this share of the planned one, with nothing and with all blocks recomputed, about as
many fit as of that: they are not looked for."""


def limits_of(planner: Planner, chosen: Candidate) -> Limits:
    """The limits of each size, looked for from what is predicted of the planned one; without those of which an attempt
    failed."""
    question, capacity_bytes = planner.question, planner.capacity(chosen.strategy)
    columns = {"none": 0, "recommended": chosen.blocks, "full": chosen.option.arrangement.count}
    sizes, planned = (question.resolution, *question.buckets), _area(question.resolution)

    def request(size: tuple[int, int], blocks: int, micro_batch_size: int) -> StepRequest:
        tried = replace(chosen, micro_batch_size=micro_batch_size, blocks=blocks)
        return planner.request(tried.strategy, size)

    def wanted(size: tuple[int, int], blocks: int) -> bool:
        near = size != question.resolution and abs(_area(size) / planned - 1) <= NEAR
        return not near or blocks == chosen.blocks

    def largest(blocks: int) -> dict[tuple[int, int], int | None]:
        """Of each size, from what is predicted of the planned one, and then from what ran last, by their pixels."""
        if blocks < chosen.option.least_blocks:
            return dict.fromkeys(sizes, 0)
        expected = largest_micro_batch(chosen.option, blocks, capacity_bytes)
        pixels, pixel_bytes = float(expected * planned), _sample_bytes(chosen.option, expected, blocks) / planned
        limits: dict[tuple[int, int], int | None] = {}
        for size in sizes:
            if not wanted(size, blocks):
                continue
            if size[::-1] in limits:  # turned by a quarter, the same samples take the same bytes
                limits[size] = limits[size[::-1]]
                continue
            known = chosen.option.ran(blocks) if size == question.resolution else {}
            row = Row(partial(request, size, blocks), pixels / _area(size), pixel_bytes * _area(size), known)
            found = planner.cards.largest(row, capacity_bytes)
            limits[size] = None if found is None else int(found[0])
            if found is not None:
                pixels = found[0] * _area(size)
                if size == question.resolution:
                    chosen.option.note(blocks, found[1])
        return limits

    rows = [*dict.fromkeys(columns.values())]
    with ThreadPoolExecutor(len(rows)) as aside:  # none waits for another's size
        ran = dict(zip(rows, aside.map(largest, rows), strict=True))
    found = {size: {column: ran[blocks].get(size) for column, blocks in columns.items()} for size in sizes}
    return {
        size: LargestMicroBatch.model_validate({"height": size[0], "width": size[1], **limits})
        for size, limits in found.items()
        if limits["recommended"] is not None
    }


def _sample_bytes(option: Option, micro_batch_size: int, blocks: int) -> float:
    """About what one more takes there."""
    size = max(micro_batch_size, 2)
    return max((option.reserved(size, blocks) - option.reserved(size / 2, blocks)) / (size / 2), 1)


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]
