"""Candidates as they are shown: as they ran, how fast they go, and why they are listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bigdit.catalog import Gpu
from bigdit.catalog.gpus import gpus
from bigdit.config.plan_file import LargestMicroBatch
from bigdit.memory import Category
from bigdit.profile.attempt import UNLIMITED, Attempt
from bigdit.search.candidates import (
    SAME_SPEED,
    Candidate,
    Option,
    Planner,
    candidate,
    fitting,
    host_bytes,
    largest_micro_batch,
    micro_batch_sizes,
    process,
)
from bigdit.search.plan import Choice, Curve, Point, Room, Setting, alike
from bigdit.search.solve import Confirmed, Ran, run
from bigdit.search.space import lossy_by
from bigdit.speed.seconds import Interval, StepTime, launches_of
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of
from bigdit.strategy import StepSize
from bigdit.units import gib

MOST_ROWS = 6
"""Of the Pareto front: each is run."""

NONE = 0.005
"""A share that would be printed as 0 %."""


def as_ran(planner: Planner, ran: Ran, recorded: Confirmed | None = None) -> Choice:
    """The choice with the bytes that it took, and seconds from what was counted of its launches. Where it was recorded,
    its work and host memory are the record's."""
    question, found, strategy = planner.question, ran.candidate, ran.candidate.strategy
    if recorded is None:
        work = found.option.arrangement.work(found.micro_batch_size, found.blocks)
        calibration = planner.evidence.calibration(strategy)
        step = step_time(work, strategy, question.gpu, question.cluster, calibration, ran.launches)
    else:
        step = step_on(planner, recorded, question.gpu)
    taken = process(ran.reserved_bytes, planner.non_torch(strategy), planner.band)
    return Choice(
        title=title(found),
        strategy=strategy,
        phases=ran.phases,
        peak_allocated_bytes=max(ran.phases.values()),
        peak_reserved_bytes=ran.reserved_bytes,
        process=taken,
        verdict=(recorded or ran).verdict,
        headroom_bytes=question.gpu.usable_bytes - taken.high_bytes,
        host_bytes=recorded.host.node_bytes if recorded else found.host_bytes(question),
        step=step,
        samples_per_second_per_card=step.seconds.per(found.micro_batch_size * found.grad_accum_steps),
        lossless=found.lossless,
        reason="",
    )


def step_on(planner: Planner, found: Confirmed, gpu: Gpu) -> StepTime:
    """The step of the same kernels on these GPUs, or others, of which no receipt tells."""
    strategy = found.candidate.strategy
    calibration = planner.evidence.calibration(strategy) if gpu == planner.question.gpu else None
    work = work_of(found.answer.timeline, strategy)
    return step_time(work, strategy, gpu, planner.question.cluster, calibration, found.ran.launches)


def title(found: Candidate) -> str:
    """`ZeRO-2 on 8, AdamW, micro-batch 6, 4 of 20 blocks recomputed`."""
    count = found.option.arrangement.count
    blocks = {0: "nothing recomputed", count: "all blocks recomputed"}.get(
        found.blocks, f"{found.blocks} of {count} blocks recomputed"
    )
    return f"{found.option.proposal.title}, micro-batch {found.micro_batch_size}, {blocks}"


def front(planner: Planner, options: Sequence[Option], known: Choice) -> tuple[Choice, ...]:
    """The Pareto front of memory against speed, beside the recommended choice, which is `known`: first of what keeps an
    optimizer's numbers as that does, then of the others where none of those is as good; MOST_ROWS at most; and the
    fastest that the recommended one was chosen from, and of each base of adapters that has no row yet.

    All of them run, and those that do not fit then are left out.
    """
    spread = {title(each): each for option in options for each in _spread(planner, option)}
    every = [each for name, each in spread.items() if name != known.title]
    alike = [each for each in every if each.lossless == known.lossless]
    own = _frontier(alike)
    others = [each for each in _frontier(every) if each.lossless != known.lossless]
    room = MOST_ROWS - 1
    shown = _thinned(own, max(room - len(others), room - room // 2))
    shown += _thinned(others, room - len(shown))
    if alike and (fastest := _fastest_first(alike)[0]) not in shown and fastest.rate.middle > _rate(known):
        shown.append(fastest)
    bases = {_base(each) for each in shown} | {None if known.strategy.lora is None else known.strategy.lora.base}
    # nf4 takes less than int8 and is as fast, so that no front has an int8 base, whose error is a tenth.
    fastest_of = {_base(each): each for each in reversed(_fastest_first(every))}
    shown += [each for base, each in fastest_of.items() if base not in bases]
    ran = [each for each in run(planner, _fastest_first(shown)) if each is not None and each.verdict != "DOES NOT FIT"]
    rows = [known, *(as_ran(planner, each) for each in ran)]
    rows.sort(key=lambda choice: (choice.lossless != known.lossless, -_rate(choice)))
    return tuple(
        choice.model_copy(update={"reason": recommended(choice, rows) if choice is known else _reason(choice, known)})
        for choice in rows
    )


def _rate(choice: Choice) -> float:
    return choice.samples_per_second_per_card.middle


def _frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of which no other one takes less and is as fast; what takes least first."""
    best: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each.reserved_bytes, -each.rate.middle)):
        if not best or each.rate.middle > best[-1].rate.middle:
            best.append(each)
    return best


def _base(found: Candidate) -> str | None:
    lora = found.option.proposal.strategy.lora
    return None if lora is None else lora.base


def _fastest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda each: -each.rate.middle)


def _spread(planner: Planner, option: Option) -> list[Candidate]:
    """The option with none to all blocks recomputed in quarters, at micro-batches up to the largest; and the fastest of
    those that the recommended one was chosen from, which has as few recomputed as fit."""
    question, capacity = planner.question, planner.capacity(option.proposal.strategy)
    count, pinned = option.arrangement.count, question.pins.checkpointed_blocks
    steps = option.quarters if pinned is None else [count if pinned == "all" else pinned]
    sizes = list(micro_batch_sizes(question, option.proposal.strategy))
    found = []
    for blocks in steps:
        most = largest_micro_batch(option, blocks, capacity)
        small = [size for size in sizes if size <= most]
        ran = option.ran(blocks)  # these cost nothing more
        chosen = {*small[:1], *small[-1:], *(size for size in small if size in ran)}
        on_host = [
            size for size in sorted(chosen) if host_bytes(question, option, size, blocks) <= question.host_memory_bytes
        ]
        found += [candidate(planner, option, size, blocks) for size in on_host]
    fastest = max(fitting(planner, option), key=lambda each: each.rate.middle, default=None)
    return found if fastest is None else [*found, fastest]


def _thinned(rows: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most so many of the rows, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(at * (len(rows) - 1) / max(most - 1, 1))] for at in range(most)]


def faster_or_slower(rate: Interval, other: Interval) -> str:
    """How much faster it is, by the middles; or how much slower where the intervals say so most, which is what tells
    strategies apart."""
    middle, worst = rate.middle / other.middle - 1, min(rate.low / other.low, rate.high / other.high) - 1
    if middle >= NONE:
        return f"{middle:.0%} faster"
    if worst > -NONE:
        return "as fast"
    return f"{'up to ' if middle - worst >= NONE else ''}{-worst:.0%} slower"


def recommended(choice: Choice, rows: Sequence[Choice]) -> str:
    """Why `choice` is the recommended one among `rows`."""
    if choice.verdict == "DOES NOT FIT":
        return "what takes least of what was asked for"
    if choice.verdict == "TIGHT":
        return "nothing of what was asked for is sure to fit, and of what may this is preferred"
    fits = [each for each in rows if each.verdict == "FITS"]
    swaps = bool(choice.strategy.blocks_to_swap)
    numbers = [each for each in fits if each.lossless == choice.lossless]
    alike = [each for each in numbers if bool(each.strategy.blocks_to_swap) == swaps]
    fastest, of_numbers, of_all = (max([choice, *among], key=_rate) for among in (alike, numbers, fits))
    among = "" if of_all in (of_numbers, choice) else " lossless one"
    among += " that fits" + ("" if of_numbers in (fastest, choice) or swaps else " with all weights on the GPU")
    if fastest is choice:
        return f"recommended: the fastest{among}"
    return f"recommended: as fast as any{among}, to {SAME_SPEED:.0%}, and of those the one that takes least"


def _reason(choice: Choice, recommended: Choice) -> str:
    less = recommended.process.high_bytes - choice.process.high_bytes
    parts = [faster_or_slower(choice.samples_per_second_per_card, recommended.samples_per_second_per_card)]
    parts.append(f"{gib(abs(less))} {'less' if less >= 0 else 'more'}")
    if recommended.lossless:
        parts += lossy_by(choice.strategy)
    if choice.verdict != "FITS":
        parts.append(choice.verdict.lower())
    return "; ".join(parts)


def settings(
    planner: Planner, options: Sequence[Option], best: Confirmed, rows: Sequence[Choice], runs: Runs
) -> tuple[Setting, ...]:
    """The options of which any size ran: `rows`, and the `runs` of the best one, which alone has categories."""
    known = {row.title: row for row in [*_choices(planner, best.candidate, runs), *rows]}
    found = []
    for option in options:
        title, strategy = option.proposal.title, option.proposal.strategy
        points = [_point(planner, best, row) for row in known.values() if alike(strategy, row.strategy)]
        points.sort(key=lambda point: (point.micro_batch_size, point.checkpointed_blocks))
        if points:
            around, ran = planner.non_torch(strategy), tuple(points)
            found.append(Setting(title=title, strategy=strategy, non_torch=around, rooms=rooms(planner), points=ran))
    return tuple(found)


def _choices(planner: Planner, chosen: Candidate, runs: Runs) -> list[Choice]:
    allowed = {*micro_batch_sizes(planner.question, chosen.strategy)}  # runs go on beyond a global batch
    micro_batches = planner.request(chosen.strategy).strategy.grad_accum_steps  # of all that ran
    found = []
    for (blocks, size), attempt in runs.items():
        if size in allowed:
            place = candidate(planner, chosen.option, size, blocks)
            launches = launches_of(attempt.launched, micro_batches)
            found.append(as_ran(planner, Ran(place, "FITS", attempt.peak_reserved_bytes, attempt.peaks, launches)))
    return found


def _point(planner: Planner, best: Confirmed, row: Choice) -> Point:
    recorded = row.strategy == best.candidate.strategy
    at_peak: dict[Category, int] = best.answer.ledger.at_peak if recorded else {}
    short = planner.question.short_of_host(row.host_bytes)
    return Point(
        micro_batch_size=row.strategy.micro_batch_size,
        checkpointed_blocks=int(row.strategy.checkpointed_blocks),
        phase=max(row.phases, key=lambda phase: row.phases[phase]),
        at_peak=at_peak,
        peak_allocated_bytes=row.peak_allocated_bytes,
        peak_reserved_bytes=row.peak_reserved_bytes,
        process=row.process,
        host_bytes=row.host_bytes,
        verdict="DOES NOT FIT" if short else row.verdict,
        samples_per_second_per_card=row.samples_per_second_per_card,
    )


def rooms(planner: Planner) -> tuple[Room, ...]:
    """The question's GPU, and those that run the same kernels with the same workspace, beside a context as large."""
    own = planner.question.gpu
    alike = (
        gpu.reserving()
        for gpu in gpus()
        if (gpu.compute_capability, gpu.multiprocessors) == (own.compute_capability, own.multiprocessors)
        and gpu.name != own.name
    )
    return tuple(Room(card=gpu.title, usable_bytes=gpu.usable_bytes) for gpu in (own, *alike))


Runs = Mapping[tuple[int, int], Attempt]
"""Attempts by the number of recomputed blocks and the micro-batch size."""


def runs(planner: Planner, chosen: Candidate, limit: LargestMicroBatch) -> Runs:
    """The sizes up to the `limit` that ran, with no block, the chosen number of them and all recomputed: two of each at
    least, where so many fit."""
    largest = {chosen.blocks: limit.recommended, 0: limit.none, chosen.option.arrangement.count: limit.full}
    places: list[tuple[int, int]] = []
    for blocks, most in largest.items():
        sizes = [size for size in chosen.option.ran(blocks) if size <= (most or 0)]
        places += [(blocks, size) for size in sorted({*sizes, 1} if len(sizes) == 1 else sizes)]
    strategies = [replace(chosen, blocks=blocks, micro_batch_size=size).strategy for blocks, size in places]
    attempts = planner.cards.attempts([(planner.request(each), UNLIMITED) for each in strategies])
    return {place: each for place, each in zip(places, attempts, strict=True) if isinstance(each, Attempt)}


def curves(planner: Planner, chosen: Candidate, ran: Runs) -> tuple[Curve, ...]:
    """One curve for each number of recomputed blocks: none, the recommended, all."""
    count, around = chosen.option.arrangement.count, planner.non_torch(chosen.strategy)
    labels = {chosen.blocks: f"{chosen.blocks} of {count} blocks", 0: "nothing recomputed"}
    found = []
    for blocks, label in sorted((labels | {count: "all blocks recomputed"}).items()):
        reserved = {size: each.peak_reserved_bytes for (of, size), each in ran.items() if of == blocks}
        taken = tuple(process(each, around, planner.band).high_bytes for each in reserved.values())
        if reserved:
            found.append(Curve(label=label, micro_batch_sizes=tuple(reserved), process_bytes=taken))
    return tuple(found)


LESS = 0.05
"""The share of the GPU that each frees, at least: what is tried costs a start each."""


def smaller(planner: Planner, chosen: Candidate) -> tuple[StepSize, ...]:
    """Sizes of the chosen strategy's step with the same global batch, each with LESS of the GPU than the one before:
    the fastest that there is."""
    found: list[StepSize] = []
    capacity = chosen.reserved_bytes
    while True:
        capacity -= LESS * planner.question.gpu.usable_bytes
        fastest = _fastest(planner, chosen, capacity)
        if fastest is None:
            return tuple(found)
        found.append(fastest.strategy.step_size)
        capacity = fastest.reserved_bytes


def _fastest(planner: Planner, chosen: Candidate, capacity_bytes: float) -> Candidate | None:
    """The fastest of the same samples a step and at least as many recomputed blocks that fits."""
    option, samples = chosen.option, chosen.micro_batch_size * chosen.grad_accum_steps
    question, found = planner.question, []
    for size in range(1, chosen.micro_batch_size + 1):
        accumulated = samples // size
        if samples % size or (accumulated > 1 and option.proposal.strategy.optimizer_in_backward):
            continue
        blocks = option.fewest_blocks(size, capacity_bytes)
        if blocks is None:
            continue
        blocks = max(blocks, chosen.blocks)
        settled = option.proposal.strategy.settled(
            micro_batch_size=size, grad_accum_steps=accumulated, checkpointed_blocks=blocks
        )
        work = option.arrangement.work(size, blocks)
        step = step_time(work, settled, question.gpu, question.cluster, planner.evidence.calibration(settled))
        found.append(Candidate(option, size, accumulated, blocks, step))
    return max(found, key=lambda each: each.rate.middle, default=None)
