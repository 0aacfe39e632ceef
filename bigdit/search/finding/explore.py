"""Proposals become options: their anchors are rehearsed side by side, and continued to the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from bigdit.errors import UserError
from bigdit.rehearse import RehearsalRequest, RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import Option, beside, most
from bigdit.search.finding.space import Proposal
from bigdit.search.plan import Rejected
from bigdit.search.predict.anchors import OF_STATE, OF_STEP, SIZES, Depths, Sample, outline, requests
from bigdit.search.predict.outline import OF_ACTIVATIONS, Arrangement, Outline, varied
from bigdit.search.predict.sibling import kinds
from bigdit.search.question import Question
from bigdit.spec import Strategy

FARTHER = 2
"""How often siblings are rehearsed at the largest predicted micro-batch: from there another one may be predicted."""


def explore(
    pool: Pool, sample: Sample, proposed: Sequence[Proposal], known: Sequence[Option] = ()
) -> tuple[list[Option], list[Rejected]]:
    """An option for each proposal, bases standing before what varies them or being among the `known`; and those that
    could not be rehearsed."""
    asked = {proposal.title: _asked(proposal) for proposal in proposed}
    batches: dict[str, list[RehearsalRequest]] = {
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


def hopeful(
    pool: Pool, sample: Sample, question: Question, group: Sequence[Proposal]
) -> tuple[list[Proposal], list[Rejected]]:
    """The engines of the group whose state leaves anything of the card, with any of their optimizers."""
    engines, rejected = [], []
    for base in (each for each in group if each.base is None):
        most = question.gpu.usable_bytes - beside(question, base.strategy).low_bytes
        if all(_hopeless(pool, sample, each, most) for each in group if base in (each, each.base)):
            rejected.append(Rejected(choice=base.title, reason="its state alone takes more than the card has"))
        else:
            engines.append(base)
    return engines, rejected


def _hopeless(pool: Pool, sample: Sample, proposal: Proposal, capacity_bytes: float) -> bool:
    """Whether what has no activations, the start and the optimizer's step, takes more than the card has."""
    strategy, _, of = _asked(proposal)[-1]
    answers = pool.rehearse(requests(sample, strategy, SIZES[:1], of))
    known = [each for each in answers if isinstance(each, RehearsedSize)]
    if len(known) < len(answers):
        return False  # which is said where it is explored
    peaks = outline(sample.model, strategy, known, of).peaks(SIZES[0])
    return max(peak for phase, peak in peaks.items() if phase not in OF_ACTIVATIONS) > capacity_bytes


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
