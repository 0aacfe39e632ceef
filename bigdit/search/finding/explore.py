"""Proposals become options: their anchors are rehearsed side by side, and continued to the whole model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bigdit.errors import UserError
from bigdit.memory import Timeline
from bigdit.memory.host import pinned_bytes
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import Option, beside, most
from bigdit.search.finding.space import Proposal
from bigdit.search.needs.host import node_bytes
from bigdit.search.plan import Rejected
from bigdit.search.predict.anchors import OF_STATE, OF_STEP, SIZES, Depths, Sample, outline, requests
from bigdit.search.predict.outline import OF_ACTIVATIONS, Arrangement, Outline, varied
from bigdit.search.predict.sibling import kinds
from bigdit.search.question import Question
from bigdit.spec import Strategy
from bigdit.units import gib

FARTHER = 2
"""How often siblings are rehearsed at the largest predicted micro-batch: from there another one may be predicted."""


def explore(
    pool: Pool, sample: Sample, proposed: Sequence[Proposal], known: Sequence[Option] = ()
) -> tuple[list[Option], list[Rejected]]:
    """An option for each proposal, bases standing before what varies them or being among the `known`; and those that
    could not be rehearsed."""
    asked = {proposal.title: _asked(proposal) for proposal in proposed}
    batches: dict[str, list[StepRequest]] = {
        title: [request for each in strategies for request in requests(sample, *each)]
        for title, strategies in asked.items()
    }
    answers = iter(pool.rehearse([request for batch in batches.values() for request in batch]))
    bases = {option.proposal.title: option for option in known}
    options, rejected = [], []
    for proposal in proposed:
        found = [next(answers) for _ in batches[proposal.title]]
        problems = [each for each in found if isinstance(each, UserError)]
        base = None if proposal.base is None else bases.get(proposal.base.title)
        if problems or (proposal.base is not None and base is None):
            why = str(problems[0]) if problems else "what it varies could not be rehearsed"
            rejected.append(Rejected(choice=proposal.title, reason=why))
            continue
        sizes = [each for each in found if isinstance(each, RehearsedSize)]
        made = Option(proposal, _arrangement(pool, sample, proposal, base.arrangement if base else None, sizes))
        options.append(bases.setdefault(proposal.title, made if base is None else base.like(made)))
    return options, rejected


@dataclass(frozen=True)
class Hopes:
    """The engines of a group whose state, with any of their optimizers, leaves anything of the card and of the
    machine's memory; those for which it is the machine that has too little; and why the others are not looked at."""

    engines: list[Proposal]
    short_of_host: list[Proposal]
    rejected: list[Rejected]


def hopeful(pool: Pool, sample: Sample, question: Question, group: Sequence[Proposal]) -> Hopes:
    """What of the group is worth exploring, by what has neither activations nor batches."""
    bases = [each for each in group if each.base is None]
    pool.rehearse([request for each in bases for request in _of_state(sample, each)])  # side by side, and kept
    hopes = Hopes([], [], [])
    for base in bases:
        most = question.gpu.usable_bytes - beside(question, base.strategy).low_bytes
        on_host: dict[str, int] = {}  # of those that the card holds
        for each in (each for each in group if base in (each, each.base)):
            state = _state(pool, sample, question, each)
            if state is None or (state.card_bytes <= most and state.machine_bytes <= question.host_memory_bytes):
                hopes.engines.append(base)
                for title, taken in on_host.items():  # with those before, AdamW first, the machine has too little
                    hopes.rejected.append(Rejected(choice=title, reason=_why(question, [taken])))
                break
            on_host |= {each.title: state.machine_bytes} if state.card_bytes <= most else {}
        else:
            hopes.short_of_host.extend([base] if on_host else [])
            hopes.rejected.append(Rejected(choice=base.title, reason=_why(question, on_host.values())))
    return hopes


def _why(question: Question, on_host: Collection[int]) -> str:
    if not on_host:
        return "its state alone takes more than the card has"
    least, memory = gib(min(on_host)), gib(question.host_memory_bytes)
    there = "assumed" if question.host_assumed else "there"
    return f"its state alone takes {least} of a machine's memory, and {memory} are {there} (--host-memory)"


@dataclass(frozen=True)
class _State:
    card_bytes: float
    machine_bytes: int


def _of_state(sample: Sample, proposal: Proposal) -> list[StepRequest]:
    strategy, _, of = _asked(proposal)[-1]
    return requests(sample, strategy, SIZES[:1], of)


def _state(pool: Pool, sample: Sample, question: Question, proposal: Proposal) -> _State | None:
    """What the start and the optimizer's step take of the card, and all but batches of its machine; None where that
    could not be rehearsed, which is said where it is explored."""
    strategy, _, of = _asked(proposal)[-1]
    answers = pool.rehearse(_of_state(sample, proposal))
    known = [each for each in answers if isinstance(each, RehearsedSize)]
    if len(known) < len(answers):
        return None
    found = outline(sample.model, strategy, known, of)
    card = max(peak for phase, peak in found.peaks(SIZES[0]).items() if phase not in OF_ACTIVATIONS)
    batches = max(_batches_bytes(each.host_timeline) for each in known)
    host = max(float(np.max(found.host.at(SIZES[0]))) - batches, 0.0)
    return _State(card, node_bytes(round(host), question.cluster, question.samples))


def _batches_bytes(host: Timeline) -> int:
    """All batches that were read, at most as many as there are at once."""
    blocks = (block for block in host.blocks if block.category == "input")
    return sum(pinned_bytes(block.nbytes) if block.pinned else block.nbytes for block in blocks)


def selective(pool: Pool, sample: Sample, options: Sequence[Option]) -> list[Option]:
    """`options`, which share activations, with checkpointed blocks that keep matrix products and attention.

    None where the model cannot be rehearsed so.
    """
    first = options[0]
    strategy = _checkpointed(first.proposal.strategy, "all", "selective")
    answers = pool.rehearse(requests(sample, strategy))
    known = [each for each in answers if isinstance(each, RehearsedSize)]
    if len(known) < len(answers):
        return []
    (kept,) = _reaching(pool, sample, [strategy], known)
    found = []
    for option in options:
        state = option.arrangement.full
        full = kept if option is first else varied(kept, first.arrangement.full, state)
        proposal = replace(
            option.proposal,
            title=f"{option.proposal.title}, selective",
            strategy=option.proposal.strategy.model_copy(update={"checkpointing": "selective"}),
        )
        found.append(option.like(Option(proposal, replace(option.arrangement, full=full))))
    return found


def _asked(proposal: Proposal) -> list[tuple[Strategy, tuple[int, ...], Depths]]:
    """The strategies to rehearse siblings of, at which micro-batch sizes, and how deep they are: of what varies another
    proposal the state alone is wanted, which is the same whatever is recomputed."""
    none, full = (_checkpointed(proposal.strategy, blocks) for blocks in (0, "all"))
    if proposal.base is not None:
        return [(none, SIZES[:1], OF_STATE)]
    return [(none, SIZES, OF_STEP), (full, SIZES, OF_STEP)]


def _arrangement(
    pool: Pool, sample: Sample, proposal: Proposal, base: Arrangement | None, known: Sequence[RehearsedSize]
) -> Arrangement:
    none, full = (_checkpointed(proposal.strategy, blocks) for blocks in (0, "all"))
    if base is not None:
        state: Outline = outline(sample.model, none, known, OF_STATE)
        return replace(base, none=varied(base.none, base.none, state), full=varied(base.full, base.none, state))
    of_none, of_full = _reaching(pool, sample, [none, full], known)
    return Arrangement(of_none, of_full, kinds(sample.model))


def _reaching(
    pool: Pool, sample: Sample, strategies: Sequence[Strategy], known: Sequence[RehearsedSize]
) -> list[Outline]:
    """Outlines of the strategies, from their anchors one after another; and from further ones at the largest
    micro-batch that is predicted, where an outline does not reach there."""
    each = len(known) // len(strategies)
    anchors = [known[at : at + each] for at in range(0, len(known), each)]
    found = [outline(sample.model, *both) for both in zip(strategies, anchors, strict=True)]
    if strategies[0].features == "online":  # a hundred samples are encoded one by one: more moments than can be matched
        return found
    for _ in range(FARTHER):
        largest = [_largest(one, sample.gpu.usable_bytes) for one in found]
        short = [at for at, (one, size) in enumerate(zip(found, largest, strict=True)) if not one.reaches(size)]
        asked = [requests(sample, strategies[at], (largest[at],)) for at in short]
        answers = iter(pool.rehearse([request for batch in asked for request in batch]))
        for at, batch in zip(short, asked, strict=True):
            more = [answer for _ in batch if isinstance(answer := next(answers), RehearsedSize)]
            if len(more) == len(batch):
                found[at] = outline(sample.model, strategies[at], [*anchors[at], *more])
    return found


def _largest(one: Outline, nbytes: int) -> int:
    """The largest micro-batch size of which no more is allocated than that."""
    return most(lambda size: max(one.peaks(size).values()) <= nbytes)


def _checkpointed(
    strategy: Strategy, blocks: int | Literal["all"], kind: Literal["full", "selective"] = "full"
) -> Strategy:
    return strategy.model_copy(update={"checkpointed_blocks": blocks, "checkpointing": kind})
