"""The search: engines first, then of the best one other optimizers and precisions, until what is best fits.

Options are explored by a few attempts of the whole model each: what they predict by, and which have no chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from bigdit.errors import UserError
from bigdit.profile.attempt import Attempt, Counted, StepRequest
from bigdit.profile.pool import WorkerEnded
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
from bigdit.search.plan import Estimate, Rejected, Verdict, node_bytes
from bigdit.search.planner import SAME_SPEED, Failure, Planner, as_fast_as, rate
from bigdit.search.space import COPIES, proposals
from bigdit.speed.work import work_of
from bigdit.strategy import LEAST_SWAPPED, Strategy
from bigdit.units import GIB, LARGEST, gib

LEAST_BYTES = {"adamw": (12, 4), "adamw_8bit": (6, 0), "came": (8, 4)}
"""Bytes a parameter that optimizers take at least, with fp32 masters and without: these and moments."""


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


def hopeful(planner: Planner, group: Sequence[Option], later: Sequence[Option] = ()) -> tuple[list[Option], ...]:
    """Engines of the group whose state, with any of their optimizers, leaves anything of the GPU and of a machine's
    memory; and those of which the GPU holds the state, and the machine does not. The others are rejected. An emulated
    GPU that has nothing to do meanwhile begins with what comes `later`."""
    request, engines, short = planner.request, list[Option](), list[Option]()
    bases = [each for each in group if each.base is None]
    # Side by side, and cached from here on. A single GPU has one engine as a rule, of which all is explored.
    soon = [each for each in group if not each.strategy.blocks_to_swap] if request.cluster.gpus == 1 else bases
    soon, then = ([each for each in some if _has_a_chance(planner, each)] for some in (soon, later))
    soon += then[: planner.gpus.count - len(soon)] if 0 < len(soon) < planner.gpus.count else []
    with ThreadPoolExecutor(max(len(soon), 1)) as aside:
        [*aside.map(partial(_first, planner), soon)]
    for base in bases:
        most = request.gpu.usable_bytes - planner.non_torch(base.strategy).low_bytes
        on_host: dict[str, int] = {}  # of those that the GPU holds
        for each in (each for each in group if base in (each, each.base)):
            if not _has_a_chance(planner, each):
                on_host |= {each.title: _least(planner, each)} if each.strategy.optimizer_in_cpu_memory else {}
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


def _least(planner: Planner, option: Option) -> int:
    """What the optimizer takes at least of where it is, a machine's memory or a GPU, without an attempt; with the
    weights and gradients of one process, which are there too. 0 where that is not known."""
    strategy, request = option.strategy, planner.request
    least = LEAST_BYTES.get(strategy.optimizer.name, (0, 0))[strategy.precision == "bf16_sr"]
    if strategy.engine == "single" and not strategy.optimizer_in_backward:
        least += 2 * COPIES["single"]
    nbytes = 0 if strategy.frozen else round(least * (request.model.params or 0) / strategy.world_size)
    return node_bytes(nbytes, request.cluster, request.samples) if strategy.optimizer_in_cpu_memory else nbytes


def _has_a_chance(planner: Planner, option: Option) -> bool:
    on_host, request = option.strategy.optimizer_in_cpu_memory, planner.request
    return _least(planner, option) <= (request.host_memory_bytes if on_host else request.gpu.usable_bytes)


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
    failed, whole = list[FailedOption](), any(not each.lossless for each in _ranked(planner))
    for option in group:
        needless = whole and option.strategy.frozen and not option.lossless  # a quantised base fits the GPU
        if option.base is None or not option.strategy.blocks_to_swap or needless:
            continue
        alone = option.base.strategy.model_copy(update={"ema": None})  # which is as large, whatever is swapped
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
        fewest = min(each.strategy.cp for each in group)
        later = [each for each in proposed if each.last_resort > resort > 0 and each.base is None]
        engines, short = hopeful(planner, [each for each in group if each.strategy.cp == fewest], later)
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
        options = [each for each in planner.options.values() if each.lossless or not lossless_later]
        best = best_that_runs(planner, ahead, options)
        if best is not None and best.verdict != "DOES NOT FIT":
            planner.rejected += _later(proposed, resort) if best.lossless else []
            planner.rejected += _adapters(planner) if resort else []
            return _over_quantised(planner, ahead, best)
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


MUCH_FASTER = 1.3
"""So many times as fast, adapters over a quantised base are recommended instead of lossless ones."""


def _over_quantised(planner: Planner, ahead: Ahead, best: Estimate) -> Estimate:
    """What trains over a quantised base, where it is MUCH_FASTER than the `best`, which is lossless; else that.

    int8 errs a tenth as much as nf4: it is taken where it is as fast.
    """
    if not best.lossless or not best.strategy.frozen:
        return best
    found = [each for each in _ranked(planner) if not each.lossless and rate(each) > MUCH_FASTER * rate(best)]
    fast = [each for each in found if as_fast_as(each, max(found, key=rate))]
    exact = [each for each in fast if each.strategy.base == "int8"] or fast
    ran = best_that_runs(planner, ahead, [planner.options[each.option] for each in exact])
    if ran is None or ran.verdict != "FITS":
        return best
    planner.passed_over = best
    return ran


def _nearest(planner: Planner, least: Estimate) -> Estimate:
    """What comes nearest to fitting. Raises UserError where it cannot be run."""
    (ran,) = planner.run([least])
    if ran is None:
        planner.gpus.attempt(planner.step_request(least.strategy))  # raises why
        raise UserError(f"{least.option}: two steps could not be run")
    return planner.record(ran)


def explore_group(planner: Planner, group: Sequence[Option], engines: Sequence[Option]) -> list[FailedOption]:
    """Add options: the group's `engines`, with samples that GPUs share, other optimizers, masters and EMAs of the best
    of them (of all where nothing fits yet), and swapped blocks. Returns what could not be run."""
    variants = [each for each in group if each.base in engines and not each.strategy.blocks_to_swap]
    # A single GPU has one engine as a rule: all side by side. Replicas may hold a quantised base alone.
    soon = [each for each in variants if planner.request.cluster.gpus == 1 or each.strategy.engine == "ddp"]
    engines, variants = [*engines, *soon], [each for each in variants if each not in soon]
    failed = explore(planner, engines)
    shared = _shared(planner, group, engines)
    failed += explore(planner, shared)
    engines = [*engines, *shared]
    found = [planner.options[each.title] for each in engines if each.title in planner.options]
    ranked = _ranked(planner, found)
    bases = {ranked[0].option} if ranked else {each.title for each in found}
    failed += explore(planner, [each for each in variants if each.base and each.base.title in bases])
    return [*failed, *swapped(planner, group)]


def _shared(planner: Planner, group: Sequence[Option], engines: Sequence[Option]) -> list[Option]:
    """The `engines` with a sample on more GPUs. None where one fits a GPU without recomputing every block, or with as
    many as are fixed: each sample would wait for exchanges, and spare memory that is not short. Samples that are shared
    anyway wait as long on more GPUs, and fewer blocks may be recomputed there; fewer may be repeated, if any are."""

    def alone(option: Option) -> Strategy:
        return option.strategy.model_copy(update={"cp": 1})

    known = {each.title for each in engines}
    more = [each for each in group if each.base is None and each.title not in known]
    more = [each for each in more if any(alone(each) == alone(engine) for engine in engines)]
    ranked = _ranked(planner, [planner.options[title] for title in known if title in planner.options])
    every = bool(ranked) and ranked[0].micro_batch_size == 1 and ranked[0].blocks == planner.request.model.block_count
    must = bool(ranked) and (ranked[0].strategy.cp > 1 or ranked[0].strategy.repeated_samples > 0)
    if not more or not ranked or must or (every and planner.request.constraints.checkpointed_blocks is None):
        return more
    reason = "one sample fits each GPU without recomputing every block; choose it with --cp 2"
    planner.rejected.append(Rejected(choice="context parallelism", reason=reason))
    return []


def _selective(planner: Planner, best: Sequence[Estimate]) -> None:
    """Selective checkpointing of what shares the activations of the best one, where that recomputes blocks, or a larger
    micro-batch would be faster if recomputing cost nothing."""
    looked_at = any(each.strategy.checkpointing == "selective" for each in planner.options.values())
    if not best or looked_at or best[0].strategy.compile_blocks or best[0].strategy.zero_stage == 3:
        return
    option = planner.options[best[0].option]
    if option.last_resort:
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
    lossy = "it is lossy, and something lossless fits; choose it with --optimizer or --lora-base"
    reasons, fewest = {True: copies, False: lossy}, min(each.strategy.cp for each in proposed)
    later = [each for each in proposed if each.last_resort > resort and each.strategy.cp == fewest]
    later = [each for each in later if each.lossless or (each.strategy.world_size > 1 and not each.waits)]
    titles = {kept: [each.title for each in later if each.lossless == kept] for kept in reasons}
    return [Rejected(choice="; ".join(titles[kept]), reason=reasons[kept]) for kept in reasons if titles[kept]]


def _adapters(planner: Planner) -> list[Rejected]:
    """Named where full fine-tuning fits by a last resort alone."""
    if planner.request.constraints.frozen or planner.request.constraints.full:
        return []
    reason = "it trains adapters, not the weights, and takes much less memory; choose it with --lora 16"
    return [Rejected(choice="LoRA", reason=reason)]


MOST_RUN = 10
"""Estimates that are run at most, on the way to the best."""

ROOMY = 0.95
"""What is predicted to take no more than this share of the GPU fits as a rule: its record need not wait."""


def best_that_runs(planner: Planner, ahead: Ahead, options: Sequence[Option]) -> Estimate | None:
    """The best that runs of these options. It alone is recorded: for what it takes of CPU memory, and by category.

    The order is by predictions, which each run moves; where nothing fits, the best of what is TIGHT. `ahead` has what
    will be asked of the best run, besides its record.
    """
    ran: dict[str, Estimate | None] = {}
    refused: set[str] = set()
    early: dict[str, Future[object]] = {}

    def held(verdict: Verdict) -> Estimate | None:
        """The best of those with this verdict, by predictions: the others' launches were not counted either."""
        found = [each for at, each in ran.items() if each and each.verdict == verdict and at not in refused]
        again = [planner.estimate(planner.options[each.option], each.micro_batch_size, each.blocks) for each in found]
        return next((ran[each.title] for each in planner.preferred(again)), None)

    aside = ThreadPoolExecutor()
    while True:
        order = [each for each in _ranked(planner, options) if each.title not in refused]
        if order and order[0].title not in ran and len(ran) < MOST_RUN:
            asked = _pair(planner, order)[: planner.gpus.count]
            running = aside.submit(planner.run, asked)
            if order[0].peak_reserved_bytes <= ROOMY * planner.capacity(order[0].strategy) and not early:
                early[order[0].title] = aside.submit(planner.gpus.profile, planner.step_request(order[0].strategy))
            ran |= zip((each.title for each in asked), running.result(), strict=True)
            continue
        best = held("FITS")
        if best is None:
            break
        asked_next = aside.submit(ahead, best)
        wait([early[best.title]] if best.title in early else [])
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
    fixed = planner.request.constraints.checkpointed_blocks is not None or best.blocks in (0, option.count)
    second = [each for each in new[1:] if each.strategy != best.strategy][:1]
    first = option.title not in {title for title, _, _ in option.corrections}
    if first or fixed or option.reserved(size, best.blocks - 1) <= planner.capacity(option.strategy):
        return [best, *second]
    return [best, planner.estimate(option, size, best.blocks + 1)]
