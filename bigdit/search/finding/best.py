"""The search: engines first, then of the best one other optimizers and precisions, until what is best fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bigdit.errors import UserError
from bigdit.search.finding.candidates import (
    SAME_SPEED,
    Candidate,
    Option,
    Planner,
    candidate,
    fastest_without_state,
    fitting,
    largest_micro_batch,
    micro_batch_sizes,
    preferred,
)
from bigdit.search.finding.confirm import Confirmed, best_that_runs, confirm, run
from bigdit.search.finding.explore import explore, hopeful, selective, swapped
from bigdit.search.finding.space import Proposal, proposals
from bigdit.search.plan import Rejected
from bigdit.units import GIB, LARGEST

WORTH_LOSING = 0.10
"""A lossy optimizer over several GPUs is looked at where it could be faster than the best lossless one by more."""


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
        rejected += [*hopes.rejected, *explored(planner, group, hopes.engines, options)]
        lossless_later = any(each.lossless for each in proposed if each.last_resort > resort)
        wanted = [each for each in _ranked(planner, options) if each.lossless or not lossless_later]
        options += _selective(planner, wanted[:1], options)
        best = best_that_runs(planner, partial(_ranked, planner, options), ahead, lossless_later=lossless_later)
        if best and best[0].verdict != "DOES NOT FIT" and (best[0].candidate.lossless or not lossless_later):
            rejected += [*_later(proposed, resort), *(_adapters(planner) if resort else [])]
            return Found(planner, options, rejected, best[0])
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
    """Add the group's `engines` to `options`; then, of the best engine, other optimizers, masters and EMAs. Of all
    engines, where nothing fits yet; and blocks that are swapped. Returns what could not be run."""
    variants = [each for each in group if each.base in engines and not each.strategy.blocks_to_swap]
    if planner.question.cluster.gpus == 1:  # one engine as a rule: all side by side
        engines, variants = [*engines, *variants], []
    found, rejected = explore(planner, engines)
    ranked = _ranked(planner, found)
    bases = {option.proposal.title for option in ([ranked[0].option] if ranked else found)}
    variants, slower = _worthwhile(
        planner, ranked[:1], [each for each in variants if each.base and each.base.title in bases]
    )
    more, failed_too = explore(planner, variants, found)
    rejected += [*slower, *failed_too]
    options += [*found, *more]
    waiting, failed_last = swapped(planner, group, options)
    options += waiting
    return [*rejected, *failed_last]


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


def _worthwhile(
    planner: Planner, best: Sequence[Candidate], variants: Sequence[Proposal]
) -> tuple[list[Proposal], list[Rejected]]:
    """The variants, but for lossy ones over several GPUs that could not be preferred even if they took nothing: a GPU
    has its shard of the state alone, so that they save little of it. On one GPU they are worth seeing beside it."""
    if not best or best[0].strategy.world_size == 1:
        return list(variants), []
    option = best[0].option
    rate = max(each.rate.middle for each in fitting(planner, option))
    bound = fastest_without_state(planner, option)
    if bound > rate * (1 + WORTH_LOSING):
        return list(variants), []
    kept, lossy = ([each for each in variants if each.lossless == wanted] for wanted in (True, False))
    more = bound / rate - 1
    gain = f"{more:.0%} faster at most" if round(more, 2) > 0 else "no faster"
    reason = f"without any state in the way it would be {gain}; --optimizer asks for it"
    return kept, [Rejected(choice="; ".join(each.title for each in lossy), reason=reason)] if lossy else []


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
    """The lossless strategies that come after the `resort` in which something fits."""
    titles = [each.title for each in proposed if each.lossless and each.last_resort > resort]
    if not titles:
        return []
    reason = "every step would wait for copies over PCIe and the host's cores, and something fits without that"
    if resort:
        reason = "every step would copy all weights over PCIe, and something fits that copies fewer"
    return [Rejected(choice="; ".join(titles), reason=reason)]


def _adapters(planner: Planner) -> list[Rejected]:
    """Named where full fine-tuning fits by a last resort alone."""
    if planner.question.pins.lora_rank is not None or planner.question.pins.full:
        return []
    reason = "frozen weights have no gradients and no state, and adapters are another training; --lora 16 asks for them"
    return [Rejected(choice="LoRA", reason=reason)]
