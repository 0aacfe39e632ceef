"""Exploring options: a few attempts of the whole model feed an option's predictions, or show that it cannot fit.

First engines, then variants of the best one: other optimizers and precisions, block swap, selective checkpointing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from functools import partial

from bigdit.errors import UserError
from bigdit.profile.attempt import Attempt, Counted
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
    state_bytes,
)
from bigdit.search.plan import Estimate, Rejected, node_bytes
from bigdit.search.planner import SAME_SPEED, Failure, Planner, rate
from bigdit.search.space import COPIES
from bigdit.speed.work import work_of
from bigdit.strategy import LEAST_SWAPPED, Strategy
from bigdit.units import gib

LEAST_BYTES = {"adamw": (12, 4), "adamw_8bit": (6, 0), "came": (8, 4)}
"""Least bytes per parameter of masters and moments, with fp32 masters and without."""


Failed = dict[str, Failure]
"""Why options could not run, by their titles."""


def probe(planner: Planner, strategies: Sequence[Strategy], *, variant: bool = False) -> list[Attempt | Failure]:
    """Attempts that predictions start from.

    Work is counted at FIRST, and at all sizes with nothing recomputed, since recomputation is proportional to samples.
    Each swapped block adds the same work. Of a `variant` only the update is counted; packed weights have the update of
    the plain ones.
    """
    counted: list[Counted] = []
    for strategy in strategies:
        packed = variant and strategy.packed
        few = strategy.blocks_to_swap == LEAST_SWAPPED < planner.request.model.block_count
        first = strategy.micro_batch_size == FIRST or strategy.checkpointed_blocks == 0
        counted.append("nothing" if packed or few or not first else "update" if variant else "step")
    return planner.unlimited(strategies, counted)


def explore(planner: Planner, proposed: Sequence[Option]) -> Failed:
    """Add options to the planner, and return those that could not run. Bases come before their variants."""
    found = planner.gpus.apart(partial(_attempts_of, planner), proposed)
    failed, count = Failed(), planner.request.model.block_count
    for option, (strategies, attempts) in zip(proposed, found, strict=True):
        ran = [each for each in attempts if isinstance(each, Attempt)]
        errors = [each for each in attempts if not isinstance(each, Attempt)]
        base = None if option.base is None else planner.options.get(option.base.title)
        if base is None and option.base is not None:
            errors.append(UserError("the option that it varies could not run"))
        if errors:
            failed[option.title] = errors[0]
            continue
        alone = _alone(planner, option)
        if alone is not None:
            share = 1 / option.strategy.cp
            none = alone.none.with_samples_of(strategies[0], ran[0], share)
            full = alone.full.with_samples_of(strategies[1], ran[1], share)
        elif base is None:
            none = Policy.of(strategies[::2], ran[::2])
            full = Policy.of(strategies[1::2], ran[1::2], none)
        else:
            none, full = (each.varied(option.strategy, base.anchor, ran[0]) for each in (base.none, base.full))
        planner.options.setdefault(option.title, option.predicting(none, full, count, ran[0], base))
    return failed


def _first_strategies(planner: Planner, option: Option) -> list[Strategy]:
    """Strategies with nothing and with all blocks recomputed. A variant needs one, since only its state is read, which
    does not depend on recomputation, compilation or FP8."""
    none, full = (_with_recomputed(option.strategy, each, FIRST) for each in (0, planner.request.model.block_count))
    return [none, full] if option.base is None else [_plain(none)]


def _alone(planner: Planner, option: Option) -> Option | None:
    """The explored option that differs from a base only in cp, which is 1; None if there is none."""
    strategy, shared = option.strategy.model_copy(update={"cp": 1}), option.base is None and option.strategy.cp > 1
    return next((each for each in planner.options.values() if shared and each.strategy == strategy), None)


def _plain(strategy: Strategy) -> Strategy:
    return strategy.model_copy(update={"compile_blocks": False, "float8": "none"})


def _first_attempt(planner: Planner, option: Option) -> Attempt | Failure:
    """The attempt that an option's state is read from. With an optimizer in CPU memory it is not
    compiled, since CPU memory may be too small for it."""
    strategy, *_ = _first_strategies(planner, option)
    strategy = _plain(strategy) if option.strategy.optimizer_in_cpu_memory else strategy
    return probe(planner, [strategy], variant=option.base is not None)[0]


def _attempts_of(planner: Planner, option: Option) -> tuple[list[Strategy], list[Attempt | Failure]]:
    """The first attempts of an option, and second ones of a base, at about the largest micro-batch that fits.

    A base with context parallelism needs no second ones if it was explored without.
    """
    firsts, seconds = _first_strategies(planner, option), list[Strategy]()
    found = probe(planner, firsts, variant=option.base is not None)
    ran = [each for each in found if isinstance(each, Attempt)]
    if len(ran) == 2 and _alone(planner, option) is None:
        most = [*planner.micro_batch_sizes(option.strategy)][-1]
        sizes = filling(ran, planner.request.model.block_count, planner.capacity(option.strategy))
        pairs = zip(firsts, sizes, strict=True)
        seconds = [each.with_micro_batch_size(max(min(size, most), SECOND)) for each, size in pairs]
    return [*firsts, *seconds], [*found, *probe(planner, seconds)]


def hopeful(planner: Planner, group: Sequence[Option], later: Sequence[Option] = ()) -> tuple[list[Option], ...]:
    """Engines whose state fits the GPU and CPU memory with any optimizer; and those whose state only fits the GPU.

    All others are rejected. If an emulated GPU is idle, it already begins with the first option that comes `later`.
    """
    request, engines, short = planner.request, list[Option](), list[Option]()
    bases = [each for each in group if each.base is None]
    # Attempts run in parallel and are cached. A single GPU usually has one engine, whose variants are all explored.
    soon = [each for each in group if not each.strategy.blocks_to_swap] if request.cluster.gpus == 1 else bases
    soon, then = ([each for each in some if _may_fit(planner, each)] for some in (soon, later))
    soon += then[:1] if 0 < len(soon) < planner.gpus.count else []
    planner.gpus.apart(partial(_begin, planner), soon)
    for base in bases:
        on_host: dict[str, int] = {}  # bytes by title, of those that fit the GPU
        for each in (each for each in group if base in (each, each.base)):
            if not _may_fit(planner, each):
                if each.strategy.optimizer_in_cpu_memory:
                    on_host[each.title] = _least_optimizer_bytes(planner, each)
                continue
            holds, host = _state(planner, each)
            if holds and host <= request.host_memory_bytes:
                engines.append(base)
                for title, taken in on_host.items():  # larger optimizers, which were tried before
                    _reject(planner, title, [taken])
                break
            on_host |= {each.title: host} if holds else {}
        else:
            short += [base] if on_host else []
            _reject(planner, base.title, on_host.values())
    return engines, short


def _begin(planner: Planner, option: Option) -> None:
    """Run the first attempts of an option. If it is a base whose state fits, also run the second ones."""
    if not option.strategy.optimizer_in_cpu_memory:
        probe(planner, _first_strategies(planner, option), variant=option.base is not None)
    ran = isinstance(_first_attempt(planner, option), Attempt)
    holds, host = _state(planner, option)
    if ran and option.base is None and holds and host <= planner.request.host_memory_bytes:
        _attempts_of(planner, option)


def _state(planner: Planner, option: Option) -> tuple[bool, int]:
    """Whether the GPU holds the option's state, and the least CPU memory of a machine, from its first attempt."""
    found, request = _first_attempt(planner, option), planner.request  # if it failed, `explore` reports why
    most = request.usable_bytes - planner.non_torch(option.strategy).low_bytes
    state = host_peak(found) if isinstance(found, Attempt) else 0
    holds = not isinstance(found, Attempt) or state_bytes(found) <= most
    return holds, node_bytes(state, request.cluster, request.samples)


def _least_optimizer_bytes(planner: Planner, option: Option) -> int:
    """Least bytes of the optimizer, of a GPU or of a machine's memory, known without an attempt; 0 if not known.

    On a single GPU weights and gradients are added, since they are in the same place.
    """
    strategy, request = option.strategy, planner.request
    least = LEAST_BYTES.get(strategy.optimizer.name, (0, 0))[strategy.precision == "bf16_sr"]
    if strategy.engine == "single" and not strategy.optimizer_in_backward:
        least += 2 * COPIES["single"]
    nbytes = 0 if strategy.frozen else round(least * (request.model.params or 0) / strategy.world_size)
    return node_bytes(nbytes, request.cluster, request.samples) if strategy.optimizer_in_cpu_memory else nbytes


def _may_fit(planner: Planner, option: Option) -> bool:
    on_host, request = option.strategy.optimizer_in_cpu_memory, planner.request
    return _least_optimizer_bytes(planner, option) <= (request.host_memory_bytes if on_host else request.usable_bytes)


def _reject(planner: Planner, title: str, on_host: Collection[int]) -> None:
    reason = "its state alone takes more than the GPU has"
    if on_host:
        least, memory = gib(min(on_host)), gib(planner.request.host_memory_bytes)
        has = "is assumed to have" if planner.request.host_assumed else "has"
        reason = f"its state and saving it take {least} of CPU memory, and a machine {has} {memory} (--host-memory)"
    planner.rejected.append(Rejected(choice=title, reason=reason))


def selective(planner: Planner, options: Sequence[Option]) -> None:
    """Add `options`, which share activations, with selective checkpointing, unless the model cannot run with it."""
    base = options[0]
    strategy = base.strategy.model_copy(update={"checkpointing": "selective"})
    (ran,) = probe(planner, [_with_recomputed(strategy, planner.request.model.block_count, FIRST)])
    if not isinstance(ran, Attempt):
        return
    kept = base.full.with_samples_of(strategy, ran)  # its temporaries are those of a recomputed block
    for option in options:
        full = kept if option is base else kept.varied(option.strategy, base.anchor, option.anchor)
        checkpointing = option.strategy.model_copy(update={"checkpointing": "selective"})
        made = Option(f"{option.title}, selective", checkpointing, option.base, option.last_resort)
        planner.options[made.title] = made.predicting(option.none, full, option.count, option.anchor, option)


def swapped(planner: Planner, group: Sequence[Option]) -> Failed:
    """Add options with block swap to the planner, their bases too, and return those that could not run.

    For each of the group that swaps: the fewest swapped blocks with which anything fits, and each quarter beyond.
    """
    failed, whole = Failed(), any(not each.lossless for each in planner.ranked())
    for option in group:
        needless = whole and option.strategy.frozen and not option.lossless  # a quantised base fits without swapping
        if option.base is None or not option.strategy.blocks_to_swap or needless:
            continue
        alone = option.base.strategy.model_copy(update={"ema": None})  # block swap does not change its size
        if option.base.title not in planner.options:
            failed |= explore(planner, [Option(option.base.title, option.base.strategy, None, option.base.last_resort)])
        swapping = _swapping(planner, alone, option.strategy.blocks_to_swap)
        if not isinstance(swapping, Swapping):
            failed[option.title] = swapping
        elif option.base.title in planner.options:
            planner.options |= {each.title: each for each in _swap_options(planner, option, swapping)}
    return failed


def _swapping(planner: Planner, strategy: Strategy, most: int) -> Swapping | Failure:
    """What swapped blocks save, from attempts with all blocks recomputed."""
    least, recomputed = min(LEAST_SWAPPED, most), _with_recomputed(strategy, planner.request.model.block_count, FIRST)
    places = [recomputed.model_copy(update={"blocks_to_swap": blocks}) for blocks in (0, least, most)]
    ran = []
    for each in probe(planner, places):
        if not isinstance(each, Attempt):
            return each
        ran.append(each)
    none, few, every = ran
    work = work_of(every.work, places[2]) - work_of(none.work, places[0])
    return Swapping(least, most, none, few, every, work)


def _swap_options(planner: Planner, option: Option, swapping: Swapping) -> list[Option]:
    """Options with the fewest swapped blocks with which the smallest micro-batch fits (with as many recomputed as
    allowed), or with the most; and with each quarter beyond."""
    assert option.base is not None
    base, room = planner.options[option.base.title], planner.capacity(option.strategy)
    count, most = base.count, option.strategy.blocks_to_swap
    recomputed = count if planner.request.constraints.checkpointed_blocks in (None, "all") else most
    corrections: dict[SizeKey, float] = {}  # of their own: corrections of packed weights do not apply to swapped ones
    least = next(planner.micro_batch_sizes(option.strategy), 1)

    def with_swapped(blocks: int) -> Option:
        title = f"{base.title}, weights of {blocks} of {count} blocks in CPU memory"
        strategy = option.strategy.model_copy(update={"blocks_to_swap": blocks})
        none, full = (swapping.of(each, blocks) for each in (base.none, base.full))
        made = Option(title, strategy, option.base, option.last_resort, corrections)
        return made.predicting(none, full, count, base.anchor)

    numbers = range(LEAST_SWAPPED, most)
    fits = bisect_left(numbers, True, key=lambda blocks: with_swapped(blocks).reserved(least, recomputed) <= room)
    fewest = LEAST_SWAPPED + fits
    return [with_swapped(each) for each in sorted({fewest, *(q for q in quarters(count) if fewest < q <= most)})]


def _with_recomputed(strategy: Strategy, blocks: int, micro_batch_size: int) -> Strategy:
    return strategy.with_micro_batch_size(micro_batch_size).model_copy(update={"checkpointed_blocks": blocks})


def explore_group(planner: Planner, group: Sequence[Option], engines: Sequence[Option]) -> Failed:
    """Add options to the planner, and return those that could not run.

    These are the `engines`, with context parallelism too; variants of the best one (of all if none fits); block swap.
    """
    variants = [each for each in group if each.base in engines and not each.strategy.blocks_to_swap]
    # In parallel: a single GPU usually has one engine, and under DDP perhaps only a quantised base fits.
    soon = [each for each in variants if planner.request.cluster.gpus == 1 or each.strategy.engine == "ddp"]
    engines, variants = [*engines, *soon], [each for each in variants if each not in soon]
    failed = explore(planner, engines)
    shared = _context_parallel(planner, group, engines)
    failed |= explore(planner, shared)
    engines = [*engines, *shared]
    found = [planner.options[each.title] for each in engines if each.title in planner.options]
    ranked = planner.ranked(found)
    bases = {ranked[0].option} if ranked else {each.title for each in found}
    failed |= explore(planner, [each for each in variants if each.base and each.base.title in bases])
    return failed | swapped(planner, group)


def _context_parallel(planner: Planner, group: Sequence[Option], engines: Sequence[Option]) -> list[Option]:
    """The `engines` with more context parallelism, where it can help; else none, with a line in what is rejected.

    It costs communication. It helps where one sample needs every block recomputed, or does not fit. Where samples are
    shared already, or repeated, more GPUs may recompute fewer blocks or repeat fewer samples.
    """

    def alone(option: Option) -> Strategy:
        return option.strategy.model_copy(update={"cp": 1})

    known = {each.title for each in engines}
    more = [each for each in group if each.base is None and each.title not in known]
    more = [each for each in more if any(alone(each) == alone(engine) for engine in engines)]
    ranked = planner.ranked([planner.options[title] for title in known if title in planner.options])
    every = bool(ranked) and ranked[0].micro_batch_size == 1 and ranked[0].blocks == planner.request.model.block_count
    must = bool(ranked) and (ranked[0].strategy.cp > 1 or ranked[0].strategy.repeated_samples > 0)
    if not more or not ranked or must or (every and planner.request.constraints.checkpointed_blocks is None):
        return more
    reason = "one sample fits each GPU without recomputing every block; choose it with --cp 2"
    planner.rejected.append(Rejected(choice="context parallelism", reason=reason))
    return []


def add_selective(planner: Planner, best: Sequence[Estimate]) -> None:
    """Add selective checkpointing for options with the activations of the best one, where it may help: the best one
    recomputes blocks, or a larger micro-batch would be faster if recomputation were free."""
    explored = any(each.strategy.checkpointing == "selective" for each in planner.options.values())
    if not best or explored or best[0].strategy.compile_blocks or best[0].strategy.zero_stage == 3:
        return
    if (option := planner.options[best[0].option]).last_resort:
        return
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
