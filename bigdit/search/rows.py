"""What a plan shows of estimates that ran: alternatives with reasons, curves, what-if points, smaller sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bigdit.catalog.gpus import gpus
from bigdit.config.plan_file import LargestMicroBatch
from bigdit.profile.attempt import Attempt
from bigdit.search.option import Option
from bigdit.search.plan import Estimate, lossy_by
from bigdit.search.planner import SAME_SPEED, Planner, rate
from bigdit.speed.seconds import Interval
from bigdit.strategy import StepSize
from bigdit.units import gib

MOST_ROWS = 6
"""Most rows of the Pareto front. Each of them runs."""

NONE = 0.005
"""Smaller shares would be printed as 0 %."""


def front(planner: Planner, known: Estimate) -> tuple[Estimate, ...]:
    """The Pareto front of memory against speed around `known`, the recommended estimate; at most MOST_ROWS.

    Rows that are as lossless as `known` come first. The others follow where they are better. Added are the fastest
    row, and the fastest for each dtype of frozen weights without a row. All run; those that do not fit are left out.
    """
    shown, beside = _shown(planner, known), [] if planner.passed_over is None else [planner.passed_over]
    ran = [
        each
        for each in planner.within_limit(planner.run(sorted(shown, key=rate, reverse=True)))
        if each.verdict != "DOES NOT FIT"
    ]
    rows = [*beside, *(each for each in ran if all(each.title != other.title for other in beside)), known]
    rows.sort(key=lambda row: (row.lossless != known.lossless, -rate(row)))
    reasons = [recommended(row, rows) if row is known else _reason(row, known) for row in rows]
    return tuple(row.model_copy(update={"reason": why}) for row, why in zip(rows, reasons, strict=True))


def run_shown(planner: Planner, best: Estimate) -> None:
    """Search the largest micro-batches of `best`, and run what its plan is likely to show. The attempts are cached."""

    def beside() -> Iterator[Callable[[], object]]:
        yield partial(planner.attempts_of, _shown(planner, best))
        if (limit := planner.limits[best.title].get(planner.request.resolution)) is not None:
            yield partial(runs, planner, best, limit)

    planner.find_limits(best, beside)


def _shown(planner: Planner, known: Estimate) -> list[Estimate]:
    """The predicted rows of the front, without `known`."""
    spread = {each.title: each for option in planner.options.values() for each in _spread(planner, option)}
    every = [each for title, each in spread.items() if title != known.title]
    alike = [each for each in every if each.lossless == known.lossless]
    own = _frontier(alike)
    others = [each for each in _frontier(every) if each.lossless != known.lossless]
    room = MOST_ROWS - 1
    shown = _thinned(own, max(room - len(others), room - room // 2))
    shown += _thinned(others, room - len(shown))
    if alike and (fastest := max(alike, key=rate)) not in shown and rate(fastest) > rate(known):
        shown.append(fastest)
    bases = {each.strategy.base for each in (*shown, known, planner.passed_over or known)}
    # nf4 takes less than int8 and is as fast, so no front has int8. It is added for its error, a tenth of nf4's.
    absent = dict.fromkeys(each.strategy.base for each in every if each.strategy.base not in bases)
    return shown + [max((each for each in every if each.strategy.base == base), key=rate) for base in absent]


def _frontier(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The Pareto front of these, the one with the least memory first."""
    best: list[Estimate] = []
    for each in sorted(estimates, key=lambda each: (each.peak_reserved_bytes, -rate(each))):
        if not best or rate(each) > rate(best[-1]):
            best.append(each)
    return best


def _spread(planner: Planner, option: Option) -> list[Estimate]:
    """Estimates of the option over its range: 0 to all blocks recomputed in quarters, at the smallest, the largest and
    all other micro-batches that ran; and the fastest that fits."""
    request, capacity = planner.request, planner.capacity(option.strategy)
    fixed = request.constraints.checkpointed_blocks
    steps = option.quarters if fixed is None else [option.count if fixed == "all" else fixed]
    sizes = list(planner.micro_batch_sizes(option.strategy))
    found = []
    for blocks in steps if option.strategy.checkpointing == "full" else filter(None, steps):
        most = option.largest(blocks, capacity)
        small = [size for size in sizes if size <= most]
        ran = option.ran(blocks)  # free: these attempts are cached
        chosen = {*small[:1], *small[-1:], *(size for size in small if size in ran)}
        estimates = [planner.estimate(option, size, blocks) for size in sorted(chosen)]
        found += [each for each in estimates if each.host_bytes <= request.host_memory_bytes]
    fastest = max(planner.fitting(option), key=rate, default=None)
    return found if fastest is None else [*found, fastest]


def _thinned(rows: Sequence[Estimate], most: int) -> list[Estimate]:
    """At most so many rows, evenly spread, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(at * (len(rows) - 1) / max(most - 1, 1))] for at in range(most)]


def faster_or_slower(mine: Interval, other: Interval) -> str:
    """How much faster it is by the middles of the intervals; or how much slower it may be by their worse ends, which
    decide between strategies."""
    middle, worst = mine.middle / other.middle - 1, min(mine.low / other.low, mine.high / other.high) - 1
    if middle >= NONE:
        return f"{middle:.0%} faster"
    if worst > -NONE:
        return "as fast"
    return f"{'up to ' if middle - worst >= NONE else ''}{-worst:.0%} slower"


def recommended(chosen: Estimate, rows: Sequence[Estimate]) -> str:
    """Why `chosen` is recommended among `rows`."""
    if chosen.verdict == "DOES NOT FIT":
        return "it takes the least memory of all that the options allow"
    if chosen.verdict == "TIGHT":
        return "nothing that the options allow is sure to fit; of what may fit, this is the best"
    fits = [each for each in rows if each.verdict == "FITS"]
    swaps = bool(chosen.strategy.blocks_to_swap)
    numbers = [each for each in fits if each.lossless == chosen.lossless]
    alike = [each for each in numbers if bool(each.strategy.blocks_to_swap) == swaps]
    fastest, of_numbers, of_all = (max([chosen, *among], key=rate) for among in (alike, numbers, fits))
    among = "" if of_all in (of_numbers, chosen) else " lossless one"
    among += " that fits" + ("" if of_numbers in (fastest, chosen) or swaps else " with all weights on the GPU")
    if chosen.strategy.base == "int8" and any(each.strategy.base == "nf4" for each in numbers):
        return "recommended: about as fast as over nf4, whose error is ten times as large"
    if fastest is chosen:
        return f"recommended: the fastest{among}"
    shared = any(each.strategy.cp > chosen.strategy.cp for each in fits)
    these = "these without context parallelism" if shared and chosen.strategy.cp == 1 else "these"
    best = "swaps the fewest blocks" if swaps else "takes the least memory"
    return f"recommended: within {SAME_SPEED:.0%} of the fastest{among}; of {these} it {best}"


def _reason(row: Estimate, chosen: Estimate) -> str:
    less = chosen.process.high_bytes - row.process.high_bytes
    parts = [faster_or_slower(row.samples_per_second_per_gpu, chosen.samples_per_second_per_gpu)]
    parts.append(f"{gib(abs(less))} {'less' if less >= 0 else 'more'}")
    parts += lossy_by(row.strategy) if chosen.lossless else ["lossless"] * row.lossless
    if row.verdict != "FITS":
        parts.append(row.verdict.lower())
    return "; ".join(parts)


def runs(planner: Planner, chosen: Estimate, limit: LargestMicroBatch) -> list[Estimate]:
    """All micro-batches up to the `limit` that ran, also beyond the global batch, with 0, the chosen number and all
    blocks recomputed. Each has at least two sizes, if two fit."""
    option, predicted = planner.options[chosen.option], []
    largest = {chosen.blocks: limit.recommended, 0: limit.none, option.count: limit.full}
    for blocks, most in largest.items():
        sizes = [size for size in option.ran(blocks) if size <= (most or 0)]
        for size in sorted({*sizes, 1} if len(sizes) == 1 else sizes):
            predicted.append(planner.estimate(option, size, blocks))
    # With as many micro-batches as the chosen one, as when its limits were searched: these attempts are cached.
    asked = [chosen.strategy.model_copy(update=each.sizes) for each in predicted]
    pairs = zip(predicted, asked, planner.unlimited(asked), strict=True)
    return [planner.ran(each, attempt, of) for each, of, attempt in pairs if isinstance(attempt, Attempt)]


def curves(planner: Planner, chosen: Estimate, ran: Sequence[Estimate]) -> dict[str, dict[int, int]]:
    """Bytes of the process by micro-batch, a curve for each number of recomputed blocks: 0, the recommended, all."""
    count = planner.options[chosen.option].count
    labels = {chosen.blocks: f"{chosen.blocks} of {count} blocks", 0: "nothing recomputed"}
    found: dict[str, dict[int, int]] = {}
    for blocks, label in sorted((labels | {count: "all blocks recomputed"}).items()):
        for each in ran:
            if each.blocks == blocks:
                found.setdefault(label, {})[each.micro_batch_size] = each.process.high_bytes
    return found


def every(
    planner: Planner, chosen: Estimate, rows: Sequence[Estimate], ran: Sequence[Estimate]
) -> tuple[Estimate, ...]:
    """`rows`, and of what `ran` of the chosen option the sizes that divide the global batch; sorted by option."""
    allowed = {*planner.micro_batch_sizes(chosen.strategy)}
    short = {"verdict": "DOES NOT FIT"}
    found = {
        each.title: each.model_copy(update=short if planner.request.short_of_host(each.host_bytes) else {})
        for each in ran
        if each.micro_batch_size in allowed
    }
    found |= {row.title: row for row in rows}
    order = {title: at for at, title in enumerate(planner.options)}
    return tuple(sorted(found.values(), key=lambda each: (order[each.option], each.micro_batch_size, each.blocks)))


def same_kernels(planner: Planner) -> dict[str, int]:
    """Usable bytes of the request's GPU and of all with the same kernels, workspace and size of context, by title."""
    own = planner.request.gpu
    kind = own.compute_capability, own.multiprocessors
    others = (each.reserving() for each in gpus() if (each.compute_capability, each.multiprocessors) == kind)
    return {each.title: each.usable_bytes for each in (own, *(each for each in others if each.name != own.name))}


LESS = 0.05
"""Least share of the GPU that each smaller size frees: trying one costs training a restart."""


def smaller(planner: Planner, chosen: Estimate) -> tuple[StepSize, ...]:
    """Sizes of the chosen strategy's step with the same global batch, each the fastest that frees LESS more of the
    GPU."""
    found: list[StepSize] = []
    capacity = planner.options[chosen.option].reserved(chosen.micro_batch_size, chosen.blocks)
    while True:
        capacity -= LESS * planner.request.usable_bytes
        fastest = _fastest(planner, chosen, capacity)
        if fastest is None:
            return tuple(found)
        found.append(fastest.strategy.step_size)
        capacity = fastest.peak_reserved_bytes


def _fastest(planner: Planner, chosen: Estimate, capacity_bytes: float) -> Estimate | None:
    """The fastest that fits with the same samples per step and at least as many recomputed blocks."""
    option, found = planner.options[chosen.option], []
    samples = chosen.micro_batch_size * chosen.strategy.grad_accum_steps
    for size in range(1, chosen.micro_batch_size + 1):
        accumulated = samples // size
        if samples % size or (accumulated > 1 and option.strategy.optimizer_in_backward):
            continue
        blocks = option.fewest_blocks(size, capacity_bytes)
        if blocks is not None:
            found.append(planner.estimate(option, size, max(blocks, chosen.blocks), accumulated))
    return max(found, key=rate, default=None)
