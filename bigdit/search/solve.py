"""The search: engines first, then of the best one other optimizers and precisions, until what is best fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from bigdit.errors import UserError
from bigdit.memory.process import ByteRange
from bigdit.profile.attempt import UNLIMITED, Attempt, Profile
from bigdit.search.candidates import (
    SAME_SPEED,
    Candidate,
    Option,
    Place,
    Planner,
    candidate,
    fitting,
    largest_micro_batch,
    micro_batch_sizes,
    preferred,
    process,
)
from bigdit.search.explore import explore, hopeful, selective, swapped
from bigdit.search.plan import HostNeed, Rejected, Verdict, host_need
from bigdit.search.space import Proposal, proposals
from bigdit.speed.seconds import Launches, launches_of
from bigdit.units import GIB, LARGEST


@dataclass
class Found:
    """What the search has come to: options in which something fits, and the best as it ran. The `planner`'s question is
    as it was asked, but for assumed host memory, which is as much as the best one needs."""

    planner: Planner
    options: list[Option]
    rejected: list[Rejected]
    best: Confirmed


def search(planner: Planner, ahead: Callable[[Candidate], object]) -> Found:
    """Strategies without a last resort; where no lossless one of them fits, lossless resorts too, and where none does,
    lossy ones; else the one that needs the least host memory, of a machine with as much where that is assumed; else
    what comes nearest. `ahead` has what is asked of the best one run, while it is recorded."""
    proposed, rejected = proposals(planner.question)
    options: list[Option] = []
    short_of_host: list[Proposal] = []
    for resort in sorted({each.last_resort for each in proposed}):
        group = [each for each in proposed if each.last_resort == resort]
        hopes = hopeful(planner, group)
        short_of_host += hopes.short_of_host
        failed = explored(planner, group, hopes.engines, options)
        if planner.question.model.params is None and failed and not options:  # a user's own model takes no step at all
            name = planner.question.model.name
            raise UserError(*dict.fromkeys(f"{name}: {each.reason.removeprefix('model.kwargs.')}" for each in failed))
        rejected += [*hopes.rejected, *failed]
        lossless_later = any(each.lossless for each in proposed if each.last_resort > resort)
        wanted = [each for each in _ranked(planner, options) if each.lossless or not lossless_later]
        options += _selective(planner, wanted[:1], options)
        best = best_that_runs(planner, partial(_ranked, planner, options), ahead, lossless_later=lossless_later)
        if best is not None and best.verdict != "DOES NOT FIT":
            rejected += _later(proposed, resort) if best.candidate.lossless else []
            rejected += _adapters(planner) if resort else []
            return Found(planner, options, rejected, best)
    nearest, failed = explore(planner, short_of_host)  # a machine with more memory is an answer
    options += nearest
    if not options:  # state alone is too much everywhere: by how much is still an answer
        options, failed = explore(planner, [each for each in proposed if each.base is None][-1:])
        if not options:
            raise UserError(*(f"{each.choice}: {each.reason}" for each in failed))
    least = _least_host(planner, options)
    if least is not None and planner.question.host_assumed:
        needed = math.ceil(least.host_bytes(planner.question) / GIB) * GIB
        more = planner.question.model_copy(update={"host_memory_bytes": needed})
        return search(replace(planner, question=more), ahead)
    return Found(planner, options, rejected, _nearest(planner, least or _smallest(planner, options)))


def _nearest(planner: Planner, least: Candidate) -> Confirmed:
    """What comes nearest to fitting. Raises UserError where it cannot be run."""
    (ran,) = run(planner, [least])
    if ran is None:
        planner.cards.attempt(planner.request(least.strategy))  # raises why
        raise UserError(f"{least.option.proposal.title}: two steps could not be run")
    return confirm(planner, ran)


def explored(
    planner: Planner, group: Sequence[Proposal], engines: Sequence[Proposal], options: list[Option]
) -> list[Rejected]:
    """Add options: the group's `engines`, other optimizers, masters and EMAs of the best of them (of all where nothing
    fits yet), and swapped blocks. Returns what could not be run."""
    variants = [each for each in group if each.base in engines and not each.strategy.blocks_to_swap]
    if planner.question.cluster.gpus == 1:  # one engine as a rule: all side by side
        engines, variants = [*engines, *variants], []
    found, rejected = explore(planner, engines)
    ranked = _ranked(planner, found)
    bases = {option.proposal.title for option in ([ranked[0].option] if ranked else found)}
    more, failed = explore(planner, [each for each in variants if each.base and each.base.title in bases], found)
    options += [*found, *more]
    waiting, failed_last = swapped(planner, group, options)
    options += waiting
    return [*rejected, *failed, *failed_last]


def _selective(planner: Planner, best: Sequence[Candidate], options: Sequence[Option]) -> list[Option]:
    """Selective checkpointing of what shares the activations of the best one, where that recomputes blocks, or a larger
    micro-batch would be faster if recomputing cost nothing."""
    looked_at = any(each.proposal.strategy.checkpointing == "selective" for each in options)
    if not best or best[0].option.proposal.last_resort or looked_at:
        return []
    option = best[0].option
    most = largest_micro_batch(option, option.arrangement.count, planner.capacity(option.proposal.strategy))
    sizes = [size for size in micro_batch_sizes(planner.question, option.proposal.strategy) if size <= most]
    bound = max((candidate(planner, option, size, 0).rate.middle for size in sizes), default=0.0)
    hopeless = bound <= best[0].rate.middle * (1 + SAME_SPEED) or planner.question.pins.checkpointed_blocks == 0
    if hopeless and not best[0].blocks:
        return []
    base = option.proposal.base or option.proposal
    alike = [each for each in options if (each.proposal.base or each.proposal) is base]
    return selective(planner, [each for each in alike if not each.least_blocks])


def _ranked(planner: Planner, options: Sequence[Option]) -> list[Candidate]:
    """The best candidate of each option in which something fits, the best of all first; after them the second ones."""
    order = preferred(each for option in options for each in fitting(planner, option))
    best: dict[str, Candidate] = {}
    second: dict[str, Candidate] = {}
    for each in order:
        title = each.option.proposal.title
        (second if title in best else best).setdefault(title, each)
    return [*best.values(), *second.values()]


def _least_host(planner: Planner, options: Sequence[Option]) -> Candidate | None:
    """Of what fits the GPUs, the one that needs the least host memory; None where a machine has that much."""
    question = planner.question
    anywhere = replace(planner, question=question.model_copy(update={"host_memory_bytes": LARGEST}))
    smallest = (next(fitting(anywhere, option), None) for option in options)
    least = min(filter(None, smallest), key=lambda each: each.host_bytes(question), default=None)
    return None if least is None or least.host_bytes(question) <= question.host_memory_bytes else least


def _smallest(planner: Planner, options: Sequence[Option]) -> Candidate:
    """The option that takes least at the smallest micro-batch, with all that may be recomputed."""
    pins = planner.question.pins
    size = pins.micro_batch_size or 1

    def blocks(option: Option) -> int:
        count = option.arrangement.count
        return count if pins.checkpointed_blocks in (None, "all") else int(pins.checkpointed_blocks or 0)

    least = min(options, key=lambda option: option.reserved(size, blocks(option)))
    return candidate(planner, least, size, blocks(least))


def _later(proposed: Sequence[Proposal], resort: int) -> list[Rejected]:
    """What comes after the `resort` in which something lossless fits."""
    copies = "every step would wait for copies over PCIe and the host's cores, and something fits without that"
    if resort:
        copies = "every step would copy all weights over PCIe, and something fits that copies fewer"
    reasons = {True: copies, False: "it is lossy, and something lossless fits; --optimizer and --lora ask for it"}
    later = [each for each in proposed if each.last_resort > resort]
    later = [each for each in later if each.lossless or (each.strategy.world_size > 1 and not each.waits)]
    titles = {kept: [each.title for each in later if each.lossless == kept] for kept in reasons}
    return [Rejected(choice="; ".join(titles[kept]), reason=reasons[kept]) for kept in reasons if titles[kept]]


def _adapters(planner: Planner) -> list[Rejected]:
    """Named where full fine-tuning fits by a last resort alone."""
    if planner.question.pins.lora_rank is not None or planner.question.pins.full:
        return []
    reason = "frozen weights have no gradients and no state, and adapters are another training; --lora 16 asks for them"
    return [Rejected(choice="LoRA", reason=reason)]


MOST_RUN = 10
"""Candidates that are run at most, on the way to the best."""


@dataclass(frozen=True)
class Ran:
    """How a candidate ran. `reserved_bytes` is what torch reserved of the GPU. `phases`: allocated bytes at the
    most."""

    candidate: Candidate
    verdict: Verdict
    reserved_bytes: int
    phases: dict[str, int]
    launches: Launches | None


@dataclass(frozen=True)
class Confirmed:
    """A candidate that ran, and was recorded: `taken` is what one process takes of the GPU, `host` what those of a
    machine take of its memory. `verdict` is that of both."""

    ran: Ran
    answer: Profile
    taken: ByteRange
    host: HostNeed
    verdict: Verdict

    @property
    def candidate(self) -> Candidate:
        return self.ran.candidate


def confirm(planner: Planner, ran: Ran) -> Confirmed:
    """Record what ran. Raises UserError and WorkerError where it cannot be recorded."""
    question, found = planner.question, ran.candidate
    answer = planner.cards.profile(planner.request(found.strategy))
    host = host_need(answer.host_timeline, answer.checkpoint_bytes, question.cluster, question.samples)
    short = question.short_of_host(host.node_bytes)
    taken = process(ran.reserved_bytes, planner.non_torch(found.strategy), planner.band)
    return Confirmed(ran, answer, taken, host, "DOES NOT FIT" if short else ran.verdict)


def run(planner: Planner, candidates: Sequence[Candidate]) -> list[Ran | None]:
    """As each ran on a GPU without a limit: FITS where torch reserved no more than it has for sure, TIGHT where no more
    than it may have, or where it came through within that by looking for room. None where an attempt failed.

    Options' predictions are moved by what was found.
    """
    question = planner.question
    requests = [planner.request(each.strategy) for each in candidates]
    wide = planner.cards.attempts([(request, UNLIMITED) for request in requests])
    found: list[Ran | None] = []
    for each, request, attempt in zip(candidates, requests, wide, strict=True):
        if not isinstance(attempt, Attempt) or not attempt.ran:
            found.append(None)
            continue
        wanted = reserved = attempt.peak_reserved_bytes
        most = question.gpu.usable_bytes - planner.non_torch(each.strategy).low_bytes
        said: Verdict = "FITS" if wanted <= planner.capacity(each.strategy) else "TIGHT"
        if wanted > most:
            (last,) = planner.cards.attempts([(request, max(most, 1))])
            came_through = isinstance(last, Attempt) and last.ran
            said = "TIGHT" if came_through else "DOES NOT FIT"
            reserved = last.peak_reserved_bytes if isinstance(last, Attempt) and came_through else wanted
        each.option.correct(each.micro_batch_size, each.blocks, wanted)
        launches = launches_of(attempt.launched, request.strategy.grad_accum_steps)
        found.append(Ran(each, said, reserved, attempt.peaks, launches))
    return found


def best_that_runs(
    planner: Planner,
    ranked: Callable[[], list[Candidate]],
    ahead: Callable[[Candidate], object],
    *,
    lossless_later: bool,
) -> Confirmed | None:
    """The best that runs, which alone is recorded: for what it takes of the host, and by category.

    `ranked` orders candidates by predictions, which each run moves; where nothing fits, the best of what is TIGHT. None
    that is lossy runs where others are `lossless_later`. `ahead` has what will be asked of the best run beside its
    record.
    """
    ran: dict[Place, Ran | None] = {}
    refused: set[Place] = set()

    def held(verdict: Verdict) -> Ran | None:
        found = {at: each for at, each in ran.items() if each and each.verdict == verdict and at not in refused}
        return next((found[each.place] for each in preferred(each.candidate for each in found.values())), None)

    while True:
        order = [each for each in ranked() if each.place not in refused and (each.lossless or not lossless_later)]
        if order and order[0].place not in ran and len(ran) < MOST_RUN:
            asked = _pair(planner, order)[: planner.cards.count]
            ran |= zip((each.place for each in asked), run(planner, asked), strict=True)
            continue
        best = held("FITS")
        if best is None:
            break
        with ThreadPoolExecutor(1) as aside:
            asked_next = aside.submit(ahead, best.candidate)
            confirmed = confirm(planner, best)
            asked_next.result()
        if confirmed.verdict == "FITS":
            return confirmed
        refused.add(best.candidate.place)
    tight = held("TIGHT")
    return None if tight is None else confirm(planner, tight)


def _pair(planner: Planner, new: Sequence[Candidate]) -> list[Candidate]:
    """The two best; or the best and itself with one more block recomputed, where it is a second attempt with as few as
    are thought to fit: such a one is often short of a few MiB, as the allocator's pieces fit."""
    best = new[0]
    option, size = best.option, best.micro_batch_size
    tried = any(title == option.proposal.title for title, _, _ in option.corrections)
    pinned = planner.question.pins.checkpointed_blocks is not None
    second = [each for each in new[1:] if each.strategy != best.strategy][:1]
    if not tried or pinned or best.blocks in (0, option.arrangement.count):
        return [best, *second]
    if option.reserved(size, best.blocks - 1) <= planner.capacity(option.proposal.strategy):
        return [best, *second]
    return [best, candidate(planner, option, size, best.blocks + 1)]
