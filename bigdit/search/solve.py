"""The search: options are explored, last resorts last, until the best estimate fits when it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bigdit.errors import UserError
from bigdit.profile.gpus import of_config
from bigdit.search.explore import add_selective, explore, explore_group, hopeful
from bigdit.search.option import Option
from bigdit.search.plan import Estimate, Rejected, Verdict
from bigdit.search.planner import Failure, Planner, as_fast_as, rate
from bigdit.search.rows import run_shown
from bigdit.search.space import proposals
from bigdit.units import GIB, LARGEST


def search(planner: Planner) -> Estimate:
    """The best estimate that fits, recorded; else the one that needs the least CPU memory, or comes nearest to fitting.

    Last resorts are tried in order, each where nothing lossless fits before it. Where CPU memory is only assumed and
    too small, the planner's request is changed to what the search needs. The planner then has all options in which
    something fits, what was rejected, and the largest micro-batches of an estimate that fits.
    """
    proposed, left_out = proposals(planner.request)
    planner.options, planner.rejected, short_of_host = {}, [*left_out], list[Option]()
    for resort in sorted({each.last_resort for each in proposed}):
        group = [each for each in proposed if each.last_resort == resort]
        fewest = min(each.strategy.cp for each in group)
        later = [each for each in proposed if 5 > each.last_resort > resort > 0 and each.base is None]
        engines, short = hopeful(planner, [each for each in group if each.strategy.cp == fewest], later)
        short_of_host += short
        failed = explore_group(planner, group, engines)
        if planner.request.model.params is None and failed and not planner.options:  # a user's model cannot step
            raise of_config(planner.request.model, failed.values())
        planner.rejected += [Rejected(choice=title, reason=_reason(error)) for title, error in failed.items()]
        lossless_later = any(each.lossless for each in proposed if each.last_resort > resort)
        wanted = [each for each in planner.ranked() if each.lossless or not lossless_later]
        add_selective(planner, wanted[:1])
        options = [each for each in planner.options.values() if each.lossless or not lossless_later]
        best = best_that_runs(planner, options)
        if best is not None and best.verdict != "DOES NOT FIT":
            planner.rejected += _later_resorts(proposed, resort) if (planner.passed_over or best).lossless else []
            planner.rejected += _lora_rejected(planner) if resort else []
            return best
    explore(planner, short_of_host)  # a machine with more memory may be the answer
    if not planner.options:  # no state fits: one runs, to say what is missing
        failed = explore(planner, [each for each in proposed if each.base is None][-1:])
        if not planner.options:
            raise UserError(*(f"{title}: {_reason(error)}" for title, error in failed.items()))
    least = _least_host(planner)
    if least is not None and planner.request.host_assumed:
        needed = math.ceil(least.host_bytes / GIB) * GIB
        planner.request = planner.request.model_copy(update={"host_memory_bytes": needed})
        return search(planner)
    return _record_nearest(planner, least or _smallest(planner))


def _reason(error: Failure) -> str:
    return str(error).splitlines()[0]


MUCH_FASTER = 1.3
"""Adapters over a quantised base are recommended where they are this many times as fast as lossless ones."""


def _over_quantised(planner: Planner, best: Estimate) -> Estimate | None:
    """The best over a quantised base, recorded, where the fastest is MUCH_FASTER than the lossless `best`; else None.

    int8 has a tenth of nf4's error: it is chosen where it is as fast.
    """
    if not best.lossless or not best.strategy.frozen:
        return None
    every = [each for option in planner.options.values() for each in planner.fitting(option) if not each.lossless]
    found = [each for each in every if rate(each) > MUCH_FASTER * rate(best)]
    fast = [each for each in found if as_fast_as(each, max(found, key=rate))]
    exact = [each for each in fast if each.strategy.base == "int8"] or fast
    ran = best_that_runs(planner, [planner.options[title] for title in {each.option: None for each in exact}])
    if ran is None or ran.verdict != "FITS" or rate(ran) <= MUCH_FASTER * rate(best):
        return None
    planner.passed_over = best
    return ran


def _record_nearest(planner: Planner, least: Estimate) -> Estimate:
    """The recorded estimate that comes nearest to fitting. Raises UserError if it cannot run."""
    for ran in planner.within_limit(planner.run([least])):
        return planner.record(ran)
    planner.gpus.attempt(planner.step_request(least.strategy))  # raises why
    raise UserError(f"{least.option}: two steps could not run")


def _least_host(planner: Planner) -> Estimate | None:
    """The estimate that fits the GPUs with the least CPU memory; None where a machine has that much."""
    anywhere = planner.about(planner.request.model_copy(update={"host_memory_bytes": LARGEST}))
    smallest = (next(anywhere.fitting(option), None) for option in planner.options.values())
    least = min(filter(None, smallest), key=lambda each: each.host_bytes, default=None)
    return None if least is None or least.host_bytes <= planner.request.host_memory_bytes else least


def _smallest(planner: Planner) -> Estimate:
    """The estimate with the least GPU memory: the smallest micro-batch, with as many recomputed blocks as allowed."""
    fixed = planner.request.constraints.checkpointed_blocks

    def sizes(option: Option) -> tuple[int, int]:
        blocks = option.count if fixed in (None, "all") else int(fixed or 0)
        return next(planner.micro_batch_sizes(option.strategy), 1), blocks

    least = min(planner.options.values(), key=lambda option: option.reserved(*sizes(option)))
    return planner.estimate(least, *sizes(least))


def _later_resorts(proposed: Sequence[Option], resort: int) -> list[Rejected]:
    """Options after the last `resort` in which something lossless fits."""
    copies = "every step would wait for copies over PCIe and for CPU cores, and something fits without that"
    if resort:
        copies = "every step would copy all weights over PCIe, and something that copies fewer fits"
    lossy = "it is lossy, and something lossless fits; choose it with --optimizer or --lora-base"
    reasons, fewest = {True: copies, False: lossy}, min(each.strategy.cp for each in proposed)
    later = [each for each in proposed if each.last_resort > resort and each.strategy.cp == fewest]
    later = [each for each in later if each.lossless or (each.strategy.world_size > 1 and not each.waits)]
    titles = {kept: [each.title for each in later if each.lossless == kept] for kept in reasons}
    return [Rejected(choice="; ".join(titles[kept]), reason=reasons[kept]) for kept in reasons if titles[kept]]


def _lora_rejected(planner: Planner) -> list[Rejected]:
    """LoRA as a rejected choice, where full fine-tuning fits only by a last resort."""
    if planner.request.constraints.frozen or planner.request.constraints.full:
        return []
    reason = "it trains adapters, not the weights, and takes much less memory; choose it with --lora 16"
    return [Rejected(choice="LoRA", reason=reason)]


MOST_RUN = 10
"""Most estimates that run on the way to the best."""


def best_that_runs(planner: Planner, options: Sequence[Option]) -> Estimate | None:
    """The best estimate of these options that fits when it runs, recorded; else the best TIGHT one; else None. What is
    over a quantised base may take its place.

    Predictions give the order, and each run corrects them. While an estimate is recorded, its largest micro-batches are
    searched, and what its plan shows is run.
    """
    ran: dict[str, Estimate | None] = {}
    refused: set[str] = set()

    def best_with(verdict: Verdict) -> Estimate | None:
        """The first in the predicted order that ran with this verdict. What has not run counts as fastest, too."""
        found = {at: each for at, each in ran.items() if each and each.verdict == verdict and at not in refused}
        again = [
            planner.estimate(planner.options[each.option], each.micro_batch_size, each.blocks)
            for each in found.values()
        ]
        others = (each for option in options for each in planner.fitting(option))
        return next((found[each.title] for each in planner.preferred([*again, *others]) if each.title in found), None)

    def untried() -> list[Estimate]:
        """The predicted order, if its first has not run."""
        order = [each for each in planner.ranked(options) if each.title not in refused]
        return order if order and order[0].title not in ran and len(ran) < MOST_RUN else []

    pool = ThreadPoolExecutor()
    while True:
        if order := untried():
            pair = _next_to_run(planner, order)[: planner.gpus.count]
            ran |= zip((each.title for each in pair), planner.run(pair), strict=True)
            continue
        best = best_with("FITS")
        if best is None:
            break
        if (faster := _over_quantised(planner, best)) is not None:
            return faster
        planner.progress.fits(best)
        shown = pool.submit(run_shown, planner, best)
        recorded = planner.record(best)
        shown.result()
        if recorded.verdict != "FITS":
            refused.add(best.title)
        elif not untried() and best_with("FITS") is best:  # else the largest micro-batches changed the order
            return recorded
    ran |= {each.title: each for each in planner.within_limit(ran.values())}
    tight = best_with("TIGHT")
    return None if tight is None else _over_quantised(planner, tight) or planner.record(tight)


def _next_to_run(planner: Planner, new: Sequence[Estimate]) -> list[Estimate]:
    """The two best to run together. From its second attempt on, an option with the fewest blocks that should fit goes
    with one more block instead of the second best: fragmentation often leaves it a few MiB short."""
    best = new[0]
    option, size = planner.options[best.option], best.micro_batch_size
    fixed = planner.request.constraints.checkpointed_blocks is not None or best.blocks in (0, option.count)
    second = [each for each in new[1:] if each.strategy != best.strategy][:1]
    first = option.title not in {title for title, _, _ in option.corrections}
    if first or fixed or option.reserved(size, best.blocks - 1) <= planner.capacity(option.strategy):
        return [best, *second]
    return [best, planner.estimate(option, size, best.blocks + 1)]
