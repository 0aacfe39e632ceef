"""The search: engines first, then of the best one other optimizers and precisions, until what is best fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bigdit.errors import UserError
from bigdit.profile.pool import WorkerEnded
from bigdit.search.explore import FailedOption, explore, hopeful, selective, swapped
from bigdit.search.option import Option
from bigdit.search.plan import Estimate, Rejected, Verdict
from bigdit.search.planner import SAME_SPEED, Planner, rate
from bigdit.search.space import proposals
from bigdit.units import GIB, LARGEST

Ahead = Callable[[Estimate], object]


def search(planner: Planner, ahead: Ahead) -> Estimate:
    """The best estimate, recorded, of strategies without a last resort; where no lossless one of them fits, of lossless
    resorts too, and where none does, of lossy ones; else the one that needs the least CPU memory, of a machine with as
    much where that is assumed; else what comes nearest.

    The planner has all options in which something fits, and what was rejected. Its request is then as it was asked,
    but for assumed CPU memory, which is as much as the best one needs. `ahead` has what is asked of the best one run,
    while that is recorded.
    """
    proposed, left_out = proposals(planner.request)
    planner.options, planner.rejected, short_of_host = {}, [*left_out], list[Option]()
    for resort in sorted({each.last_resort for each in proposed}):
        group = [each for each in proposed if each.last_resort == resort]
        engines, short = hopeful(planner, group)
        short_of_host += short
        failed = explore_group(planner, group, engines)
        if planner.request.model.params is None and failed and not planner.options:  # a user's model takes no step
            for each in failed:
                if isinstance(each.error, WorkerEnded):  # which is not the user's error
                    raise each.error
            name, reasons = planner.request.model.name, (each.reason for each in failed)
            raise UserError(*dict.fromkeys(f"{name}: {each.removeprefix('model.kwargs.')}" for each in reasons))
        planner.rejected += [Rejected(choice=each.title, reason=each.reason) for each in failed]
        lossless_later = any(each.lossless for each in proposed if each.last_resort > resort)
        wanted = [each for each in _ranked(planner) if each.lossless or not lossless_later]
        _selective(planner, wanted[:1])
        best = best_that_runs(planner, ahead, lossless_later=lossless_later)
        if best is not None and best.verdict != "DOES NOT FIT":
            planner.rejected += _later(proposed, resort) if best.lossless else []
            planner.rejected += _adapters(planner) if resort else []
            return best
    explore(planner, short_of_host)  # a machine with more memory is an answer
    if not planner.options:  # state alone is too much everywhere: by how much is still an answer
        failed = explore(planner, [each for each in proposed if each.base is None][-1:])
        if not planner.options:
            raise UserError(*(f"{each.title}: {each.reason}" for each in failed))
    least = _least_host(planner)
    if least is not None and planner.request.host_assumed:
        needed = math.ceil(least.host_bytes / GIB) * GIB
        planner.request = planner.request.model_copy(update={"host_memory_bytes": needed})
        return search(planner, ahead)
    return _nearest(planner, least or _smallest(planner))


def _nearest(planner: Planner, least: Estimate) -> Estimate:
    """What comes nearest to fitting. Raises UserError where it cannot be run."""
    (ran,) = planner.run([least])
    if ran is None:
        planner.gpus.attempt(planner.step_request(least.strategy))  # raises why
        raise UserError(f"{least.option}: two steps could not be run")
    return planner.record(ran)


def explore_group(planner: Planner, group: Sequence[Option], engines: Sequence[Option]) -> list[FailedOption]:
    """Add options: the group's `engines`, other optimizers, masters and EMAs of the best of them (of all where nothing
    fits yet), and swapped blocks. Returns what could not be run."""
    variants = [each for each in group if each.base in engines and not each.strategy.blocks_to_swap]
    if planner.request.cluster.gpus == 1:  # one engine as a rule: all side by side
        engines, variants = [*engines, *variants], []
    failed = explore(planner, engines)
    found = [planner.options[each.title] for each in engines if each.title in planner.options]
    ranked = _ranked(planner, found)
    bases = {ranked[0].option} if ranked else {each.title for each in found}
    failed += explore(planner, [each for each in variants if each.base and each.base.title in bases])
    return [*failed, *swapped(planner, group)]


def _selective(planner: Planner, best: Sequence[Estimate]) -> None:
    """Selective checkpointing of what shares the activations of the best one, where that recomputes blocks, or a larger
    micro-batch would be faster if recomputing cost nothing."""
    looked_at = any(each.strategy.checkpointing == "selective" for each in planner.options.values())
    if not best or looked_at or best[0].strategy.compile_blocks or planner.options[best[0].option].last_resort:
        return
    option = planner.options[best[0].option]
    most = option.largest(option.count, planner.capacity(option.strategy))
    sizes = [size for size in planner.micro_batch_sizes(option.strategy) if size <= most]
    bound = max((rate(planner.estimate(option, size, 0)) for size in sizes), default=0.0)
    fixed = planner.request.constraints.checkpointed_blocks
    hopeless = bound <= rate(best[0]) * (1 + SAME_SPEED) or fixed == 0
    if hopeless and not best[0].blocks:
        return
    base = option.base or option
    alike = [each for each in planner.options.values() if (each.base or each) is base]
    selective(planner, [each for each in alike if not each.strategy.blocks_to_swap])


def _ranked(planner: Planner, options: Sequence[Option] | None = None) -> list[Estimate]:
    """The best estimate of each option in which something fits, the best of all first; after them the second ones."""
    every = planner.options.values() if options is None else options
    best: dict[str, Estimate] = {}
    second: dict[str, Estimate] = {}
    for each in planner.preferred(each for option in every for each in planner.fitting(option)):
        (second if each.option in best else best).setdefault(each.option, each)
    return [*best.values(), *second.values()]


def _least_host(planner: Planner) -> Estimate | None:
    """Of what fits the GPUs, the one that needs the least CPU memory; None where a machine has that much."""
    anywhere = planner.about(planner.request.model_copy(update={"host_memory_bytes": LARGEST}))
    smallest = (next(anywhere.fitting(option), None) for option in planner.options.values())
    least = min(filter(None, smallest), key=lambda each: each.host_bytes, default=None)
    return None if least is None or least.host_bytes <= planner.request.host_memory_bytes else least


def _smallest(planner: Planner) -> Estimate:
    """The option that takes least at the smallest micro-batch, with all that may be recomputed."""
    fixed = planner.request.constraints
    size = fixed.micro_batch_size or 1

    def blocks(option: Option) -> int:
        return option.count if fixed.checkpointed_blocks in (None, "all") else int(fixed.checkpointed_blocks or 0)

    least = min(planner.options.values(), key=lambda option: option.reserved(size, blocks(option)))
    return planner.estimate(least, size, blocks(least))


def _later(proposed: Sequence[Option], resort: int) -> list[Rejected]:
    """What comes after the `resort` in which something lossless fits."""
    copies = "every step would wait for copies over PCIe and for CPU cores, and something fits without that"
    if resort:
        copies = "every step would copy all weights over PCIe, and something that copies fewer fits"
    reasons = {True: copies, False: "it is lossy, and something lossless fits; choose it with --optimizer or --lora"}
    later = [each for each in proposed if each.last_resort > resort]
    later = [each for each in later if each.lossless or (each.strategy.world_size > 1 and not each.waits)]
    titles = {kept: [each.title for each in later if each.lossless == kept] for kept in reasons}
    return [Rejected(choice="; ".join(titles[kept]), reason=reasons[kept]) for kept in reasons if titles[kept]]


def _adapters(planner: Planner) -> list[Rejected]:
    """Named where full fine-tuning fits by a last resort alone."""
    if planner.request.constraints.lora_rank is not None or planner.request.constraints.full:
        return []
    reason = "it trains adapters, not the weights, and takes much less memory; choose it with --lora 16"
    return [Rejected(choice="LoRA", reason=reason)]


MOST_RUN = 10
"""Estimates that are run at most, on the way to the best."""


def best_that_runs(planner: Planner, ahead: Ahead, *, lossless_later: bool) -> Estimate | None:
    """The best that runs, which alone is recorded: for what it takes of CPU memory, and by category.

    The order is by predictions, which each run moves; where nothing fits, the best of what is TIGHT. None
    that is lossy runs where others are `lossless_later`. `ahead` has what will be asked of the best run, besides its
    record.
    """
    ran: dict[str, Estimate | None] = {}
    refused: set[str] = set()

    def held(verdict: Verdict) -> Estimate | None:
        """The best of those with this verdict, by predictions: the others' launches were not counted either."""
        found = [each for at, each in ran.items() if each and each.verdict == verdict and at not in refused]
        again = [planner.estimate(planner.options[each.option], each.micro_batch_size, each.blocks) for each in found]
        return next((ran[each.title] for each in planner.preferred(again)), None)

    while True:
        order = [each for each in _ranked(planner) if each.title not in refused]
        order = [each for each in order if each.lossless or not lossless_later]
        if order and order[0].title not in ran and len(ran) < MOST_RUN:
            asked = _pair(planner, order)[: planner.gpus.count]
            ran |= zip((each.title for each in asked), planner.run(asked), strict=True)
            continue
        best = held("FITS")
        if best is None:
            break
        with ThreadPoolExecutor(1) as aside:
            asked_next = aside.submit(ahead, best)
            recorded = planner.record(best)
            asked_next.result()
        if recorded.verdict == "FITS":
            return recorded
        refused.add(best.title)
    tight = held("TIGHT")
    return None if tight is None else planner.record(tight)


def _pair(planner: Planner, new: Sequence[Estimate]) -> list[Estimate]:
    """The two best; or the best and itself with one more block recomputed, where it is a second attempt with as few as
    are thought to fit: such a one is often short of a few MiB, as the allocator's pieces fit."""
    best = new[0]
    option, size = planner.options[best.option], best.micro_batch_size
    tried = any(title == option.title for title, _, _ in option.corrections)
    fixed = planner.request.constraints.checkpointed_blocks is not None
    second = [each for each in new[1:] if each.strategy != best.strategy][:1]
    if not tried or fixed or best.blocks in (0, option.count):
        return [best, *second]
    if option.reserved(size, best.blocks - 1) <= planner.capacity(option.strategy):
        return [best, *second]
    return [best, planner.estimate(option, size, best.blocks + 1)]
