"""The search: engines first, then of the best one other optimizers and precisions, until what is best fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigdit.errors import UserError
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import (
    Candidate,
    Option,
    candidate,
    capacity,
    fastest_without_state,
    fitting,
    preferred,
)
from bigdit.profile.cards import Device
from bigdit.search.finding.confirm import Confirmed, best_that_runs, confirm, confirmed_best
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.explore import explore, hopeful, selective
from bigdit.search.finding.space import Proposal, proposals
from bigdit.search.finding.swapped import swapped
from bigdit.search.plan import Rejected
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Question
from bigdit.units import GIB, LARGEST

WORTH_LOSING = 0.10
"""A lossy optimizer over several cards is looked at where it could be faster than the best lossless one by more."""


@dataclass
class Found:
    """What the search has come to: options in which something fits, and the rehearsals of the best. `question` is as it
    was asked, but for assumed host memory, which is as much as the best one needs."""

    question: Question
    options: list[Option]
    rejected: list[Rejected]
    best: list[Confirmed]


def search(
    pool: Pool,
    sample: Sample,
    question: Question,
    evidence: Evidence,
    device: Device,
    ahead: Callable[[Candidate], object],
) -> Found:
    """Strategies without a last resort; where no lossless one of them fits, lossless resorts too, and where none does,
    lossy ones; else the one that needs the least host memory, of a machine with as much where that is assumed; else
    what comes nearest. `ahead` is what the device is asked of the best one, while it is rehearsed."""
    proposed, rejected = proposals(question)
    options: list[Option] = []
    short_of_host: list[Proposal] = []

    def ranked() -> list[Candidate]:
        return _ranked(question, options, evidence)

    for resort in sorted({each.last_resort for each in proposed}):
        group = [each for each in proposed if each.last_resort == resort]
        hopes = hopeful(pool, sample, question, group)
        short_of_host += hopes.short_of_host
        rejected += [*hopes.rejected, *_explore(pool, sample, question, evidence, group, hopes.engines, options)]
        lossless_later = any(each.lossless for each in proposed if each.last_resort > resort)
        if device.count:
            best = best_that_runs(
                pool, sample, question, evidence, ranked, device, ahead, lossless_later=lossless_later
            )
        else:
            best = confirmed_best(pool, sample, question, evidence, ranked)
        if best and best[0].verdict != "DOES NOT FIT" and (best[0].candidate.lossless or not lossless_later):
            rejected += _adapters(question) if resort else _last_resorts(proposed)
            return Found(question, options, rejected, best)
    nearest, failed = explore(pool, sample, short_of_host)  # a machine with more memory is an answer
    options += nearest
    if not options:  # state alone is too much everywhere: by how much is still an answer
        options, failed = explore(pool, sample, [each for each in proposed if each.base is None][-1:])
        if not options:
            raise UserError(*(f"{each.choice}: {each.reason}" for each in failed))
    least = _least_host(question, options, evidence)
    if least is not None and question.host_assumed:
        needed = math.ceil(least.host_bytes(question) / GIB) * GIB
        more = question.model_copy(update={"host_memory_bytes": needed})
        return search(pool, sample, more, evidence, device, ahead)
    least = least or _smallest(question, options, evidence)
    return Found(question, options, rejected, confirm(pool, sample, question, evidence.band, [least], device))


def _explore(
    pool: Pool,
    sample: Sample,
    question: Question,
    evidence: Evidence,
    group: Sequence[Proposal],
    engines: Sequence[Proposal],
    options: list[Option],
) -> list[Rejected]:
    """Add the group's `engines` to `options`; then, of the best engine, other optimizers, masters and averages, and
    blocks that are recomputed in part. Of all engines, where nothing fits yet; and blocks that are swapped. Returns
    what could not be rehearsed."""
    found, rejected = explore(pool, sample, engines)
    ranked = _ranked(question, found, evidence)
    bases = {option.proposal.title for option in ([ranked[0].option] if ranked else found)}
    variants, slower = _worthwhile(
        question, evidence, ranked[:1], [each for each in group if each.base and each.base.title in bases]
    )
    more, failed_too = explore(pool, sample, variants, found)
    rejected += [*slower, *failed_too]
    options += [*found, *more]
    ranked = _ranked(question, [*found, *more], evidence)
    if ranked and ranked[0].blocks and not ranked[0].option.proposal.last_resort:
        base = ranked[0].option.proposal.base or ranked[0].option.proposal
        alike = [each for each in (*found, *more) if (each.proposal.base or each.proposal) is base]
        options += selective(pool, sample, alike)
    waiting, failed_last = swapped(pool, sample, question, evidence, group, options)
    options += waiting
    return [*rejected, *failed_last]


def _worthwhile(
    question: Question, evidence: Evidence, best: Sequence[Candidate], variants: Sequence[Proposal]
) -> tuple[list[Proposal], list[Rejected]]:
    """The variants, but for lossy ones over several cards that could not be preferred even if they took nothing: a card
    has its shard of the state alone, so that they save little of it. On one card they are worth seeing beside it."""
    if not best or best[0].strategy.world_size == 1:
        return list(variants), []
    option = best[0].option
    room = capacity(question, option.proposal, evidence)
    rate = max(each.rate.middle for each in fitting(question, option, room, evidence))
    bound = fastest_without_state(question, option, room, evidence)
    if bound > rate * (1 + WORTH_LOSING):
        return list(variants), []
    kept, lossy = ([each for each in variants if each.lossless == wanted] for wanted in (True, False))
    more = bound / rate - 1
    gain = f"{more:.0%} faster at most" if round(more, 2) > 0 else "no faster"
    reason = f"without any state in the way it would be {gain}; --optimizer asks for it"
    return kept, [Rejected(choice="; ".join(each.title for each in lossy), reason=reason)] if lossy else []


def _ranked(question: Question, options: Sequence[Option], evidence: Evidence) -> list[Candidate]:
    """The best candidate of each option in which something fits, the best of all first; after them the second ones."""
    order = preferred(
        each
        for option in options
        for each in fitting(question, option, capacity(question, option.proposal, evidence), evidence)
    )
    best: dict[str, Candidate] = {}
    second: dict[str, Candidate] = {}
    for each in order:
        title = each.option.proposal.title
        (second if title in best else best).setdefault(title, each)
    return [*best.values(), *second.values()]


def _least_host(question: Question, options: Sequence[Option], evidence: Evidence) -> Candidate | None:
    """Of what fits the cards, the one that needs the least host memory; None where a machine has that much."""
    anywhere = question.model_copy(update={"host_memory_bytes": LARGEST})
    smallest = (
        next(fitting(anywhere, option, capacity(question, option.proposal, evidence), evidence), None)
        for option in options
    )
    least = min(filter(None, smallest), key=lambda each: each.host_bytes(question), default=None)
    return None if least is None or least.host_bytes(question) <= question.host_memory_bytes else least


def _smallest(question: Question, options: Sequence[Option], evidence: Evidence) -> Candidate:
    """The option that takes least at the smallest micro-batch, with all that may be recomputed."""
    pins = question.pins
    size = pins.micro_batch_size or 1

    def blocks(option: Option) -> int:
        count = option.arrangement.count
        return count if pins.checkpointed_blocks in (None, "all") else int(pins.checkpointed_blocks or 0)

    least = min(options, key=lambda option: option.reserved(size, blocks(option)))
    return candidate(question, least, size, blocks(least), evidence)


def _last_resorts(proposed: Sequence[Proposal]) -> list[Rejected]:
    titles = [each.title for each in proposed if each.last_resort == 1]
    if not titles:
        return []
    reason = "every step would wait for copies over PCIe and the host's cores, and something fits without that"
    return [Rejected(choice="; ".join(titles), reason=reason)]


def _adapters(question: Question) -> list[Rejected]:
    """Named where all weights train by a last resort alone."""
    if question.pins.lora_rank is not None or question.pins.full:
        return []
    reason = "frozen weights have no gradients and no state, and adapters are another training; --lora 16 asks for them"
    return [Rejected(choice="LoRA", reason=reason)]
