"""The answer to a question: propose, rehearse siblings, choose, confirm, and say what it means."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from bigdit.catalog import CatalogModel, batch_shape
from bigdit.catalog.revision import revision
from bigdit.errors import UserError
from bigdit.rehearse import RehearsalRequest, RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search import kept, receipts
from bigdit.search.candidates import (
    Candidate,
    Option,
    beside,
    candidate,
    capacity,
    fastest_without_state,
    fitting,
    preferred,
)
from bigdit.search.cards import Cards
from bigdit.search.choices import confirmed, front
from bigdit.search.confirm import Confirmed, confirm, confirmed_best
from bigdit.search.evidence import Evidence
from bigdit.search.explore import explore, hopeless, selective
from bigdit.search.fixes import fixes
from bigdit.search.limits import bucket_limits, curves
from bigdit.search.needs.dataset import DatasetNeed, dataset_need, encoding_request
from bigdit.search.needs.schedule import run
from bigdit.search.plan import Plan, Rejected, Run, Step
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Question
from bigdit.search.smaller import smaller
from bigdit.search.space import Proposal, proposals
from bigdit.search.waterfall import waterfall
from bigdit.spec import BatchShape, Strategy
from bigdit.speed.step import StepTime

Progress = Callable[[str], None]

WORTH_LOSING = 0.10
"""A lossy optimizer over several cards is looked at where it could be faster than the best lossless one by more."""


def make_plan(question: Question, *, progress: Progress | None = None) -> Plan:
    """The plan for `question`, from the cache where it was made before with the same versions, catalogue and receipts.

    `progress` is told what is going on, in a line. Raises UserError where the model cannot be rehearsed.
    """
    say = progress or (lambda line: None)
    places = receipts.folders() if question.receipts is None else [question.receipts]
    found, notices = receipts.read(places)
    own = receipts.of_card(found, question.gpu)
    plan = kept.find(question, own)
    if plan is not None:
        return plan
    began = time.perf_counter()

    def done(answered: int, asked: int) -> None:
        say(f"planning the training of {question.model.name}: {answered} of {asked} rehearsals")

    def tried(attempts: int) -> None:
        say(f"planning the training of {question.model.name}: {attempts} attempts on emulated cards")

    with Pool(done=done) as pool, _cards(question, tried) as cards:
        checked, more = receipts.check(own, question.gpu, _one_by(pool))
        plan = _plan(pool, question, Evidence(tuple(checked)), cards)
        unanswered = [f"not run on an emulated card: {why}" for why in (cards.unanswered if cards else ())]
    seconds = round(time.perf_counter() - began, 3)
    no_cards = [f"not run on emulated cards: {question.no_cards}"] if question.no_cards else []
    said = (*plan.notices, *notices, *more, *no_cards, *unanswered)
    plan = plan.model_copy(update={"seconds": seconds, "notices": said})
    if not unanswered:  # it may be this minute's: a busy machine, a process that was killed
        kept.keep(question, own, plan)
    return plan


def _cards(question: Question, done: Callable[[int], None]) -> AbstractContextManager[Cards | None]:
    return Cards(question.gpu, done=done) if question.device == "emulated" else nullcontext()


def _one_by(pool: Pool) -> Callable[[RehearsalRequest], RehearsedSize]:
    def rehearse(request: RehearsalRequest) -> RehearsedSize:
        (answer,) = pool.rehearse([request])
        if isinstance(answer, UserError):
            raise answer
        return answer

    return rehearse


@dataclass
class _Found:
    """What the search has come to: options in which something fits, and the rehearsals of the best."""

    options: list[Option]
    rejected: list[Rejected]
    best: list[Confirmed]


def _plan(pool: Pool, question: Question, evidence: Evidence, cards: Cards | None) -> Plan:
    sample = Sample(question.model, question.gpu, question.resolution, question.frames)
    batch = batch_shape(question.model, question.resolution, question.frames)
    found = _search(pool, sample, question, evidence, cards)
    chosen = found.best[0]
    known = [confirmed(question, each, evidence) for each in found.best]
    option, answer = chosen.candidate.option, chosen.answer
    fits = chosen.verdict != "DOES NOT FIT"
    room = capacity(question, option.proposal, evidence)
    rooms = [capacity(question, each.proposal, evidence) for each in found.options]
    rows = front(sample, question, found.options, known, rooms, evidence, cards)
    count, blocks = option.arrangement.count, chosen.candidate.blocks
    steps, notices = _explained(pool, sample, question, evidence, chosen)
    labels = {blocks: f"{blocks} of {count} blocks", 0: "nothing recomputed", count: "all blocks recomputed"}
    return Plan(
        question=question,
        params=answer.params,
        batch=batch,
        verdict=chosen.verdict,
        band=evidence.band,
        chosen=next(row for row in rows if row.title == known[0].title),
        ledger=answer.ledger,
        footprint=chosen.footprint,
        packed_timeline=answer.packed_timeline,
        host=chosen.host,
        front=rows,
        rejected=tuple(found.rejected),
        buckets=bucket_limits(pool, sample, question, chosen.candidate, room, cards),
        curves=curves(question, chosen.candidate, evidence.band, labels),
        smaller=smaller(question, chosen.candidate, evidence),
        fixes=() if fits else fixes(pool, sample, question, evidence, known[0]),
        dataset=_dataset(pool, question, batch),
        run=_run(question, known[0].strategy, known[0].step),
        waterfall=steps,
        calibration=evidence.said(known[0].strategy),
        notices=(*_unverified(question.model), *answer.notices, *notices),
        versions=answer.versions,
        emulated=cards.build if cards is not None and chosen.ran else None,
        catalogue=revision(),
        seconds=1.0,
    )


def _unverified(model: CatalogModel) -> tuple[str, ...]:
    """What of the model was assumed or not verified, as a plan says it."""
    return () if model.unverified is None else (f"not verified of {model.name}: {model.unverified}",)


def _search(pool: Pool, sample: Sample, question: Question, evidence: Evidence, cards: Cards | None) -> _Found:
    """Strategies without a last resort; where no lossless one of them fits, those too; where none does, what comes
    nearest."""
    proposed, rejected = proposals(question)
    options: list[Option] = []

    def ranked() -> list[Candidate]:
        return _ranked(question, options, evidence)

    all_lossy = not any(each.lossless for each in proposed)
    for last_resort in (False, True):
        group = [each for each in proposed if each.last_resort == last_resort]
        rejected += _explore(pool, sample, question, evidence, group, options)
        best = confirmed_best(pool, sample, question, evidence, ranked, cards)
        if best and best[0].verdict != "DOES NOT FIT" and (best[0].candidate.lossless or last_resort or all_lossy):
            if not last_resort:
                rejected += _last_resorts(proposed)
            return _Found(options, rejected, best)
    if not options:  # state alone is too much everywhere: by how much is still an answer
        options, failed = explore(pool, sample, [each for each in proposed if each.base is None][-1:])
        if not options:
            raise UserError(*(f"{each.choice}: {each.reason}" for each in failed))
    least = _smallest(question, options, evidence)
    return _Found(options, rejected, confirm(pool, sample, question, evidence.band, [least], cards))


def _explore(
    pool: Pool,
    sample: Sample,
    question: Question,
    evidence: Evidence,
    group: Sequence[Proposal],
    options: list[Option],
) -> list[Rejected]:
    """Add the group's engines to `options`; then, of the best engine, other optimizers, masters and averages, and
    blocks that are recomputed in part. Of all engines, where nothing fits yet. Returns what could not be rehearsed."""
    engines, rejected = _hopeful(pool, sample, question, group)
    found, failed = explore(pool, sample, engines)
    rejected += failed
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
    return rejected


def _worthwhile(
    question: Question, evidence: Evidence, best: Sequence[Candidate], variants: Sequence[Proposal]
) -> tuple[list[Proposal], list[Rejected]]:
    """The variants, but for lossy ones over several cards that could not be preferred even if they took nothing: a card
    has its shard of the state alone, so that they save little of it. On one card they are worth seeing beside it."""
    if not best or best[0].strategy.world_size == 1:
        return list(variants), []
    option, rate = best[0].option, best[0].rate.middle
    bound = fastest_without_state(question, option, capacity(question, option.proposal, evidence), evidence)
    if bound > rate * (1 + WORTH_LOSING):
        return list(variants), []
    kept, lossy = ([each for each in variants if each.lossless == wanted] for wanted in (True, False))
    more = max(bound / rate - 1, 0)
    reason = f"without any state in the way it would be {more:.0%} faster at most; --optimizer asks for it"
    return kept, [Rejected(choice="; ".join(each.title for each in lossy), reason=reason)] if lossy else []


def _hopeful(
    pool: Pool, sample: Sample, question: Question, group: Sequence[Proposal]
) -> tuple[list[Proposal], list[Rejected]]:
    """The engines of the group whose state leaves anything of the card, with any of their optimizers."""
    engines, rejected = [], []
    for base in (each for each in group if each.base is None):
        most = question.gpu.usable_bytes - beside(question, base.strategy).low_bytes
        if all(hopeless(pool, sample, each, most) for each in group if base in (each, each.base)):
            rejected.append(Rejected(choice=base.title, reason="its state alone takes more than the card has"))
        else:
            engines.append(base)
    return engines, rejected


def _ranked(question: Question, options: Sequence[Option], evidence: Evidence) -> list[Candidate]:
    """The best candidate of each option in which something fits, the best of all first; after them the second ones."""
    best: list[Candidate] = []
    second: list[Candidate] = []
    for option in options:
        room = capacity(question, option.proposal, evidence)
        two = preferred(fitting(question, option, room, evidence))[:2]
        best += two[:1]
        second += two[1:]
    return [each for group in (best, second) for each in preferred(group)]


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
    titles = [each.title for each in proposed if each.last_resort]
    if not titles:
        return []
    reason = "every step would wait for copies over PCIe and the host's cores, and something fits without that"
    return [Rejected(choice="; ".join(titles), reason=reason)]


def _explained(
    pool: Pool, sample: Sample, question: Question, evidence: Evidence, chosen: Confirmed
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """The waterfall where it is wanted, or a notice of what on the way to `chosen` could not be rehearsed."""
    if not question.explain:
        return (), ()
    try:
        return waterfall(pool, sample, question, evidence, chosen), ()
    except UserError as error:
        return (), (f"the way to the recommended setting is not shown: {error}",)


def _dataset(pool: Pool, question: Question, batch: BatchShape) -> DatasetNeed | None:
    if question.images is None:
        return None
    request = encoding_request(question, batch)
    encoding = None if request is None else pool.rehearse([request])[0]
    return dataset_need(question, batch, None if isinstance(encoding, UserError) else encoding)


def _run(question: Question, strategy: Strategy, step: StepTime) -> Run | None:
    if question.images is None:
        return None
    return run(
        question.images,
        question.epochs,
        strategy.global_batch_size,
        step,
        question.cluster.gpus,
        question.price,
    )
