"""A plan is made: search, and say what was found and what it means."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from bigdit.catalog import CatalogModel, batch_shape
from bigdit.catalog.revision import revision
from bigdit.errors import UserError
from bigdit.receipt import Receipt
from bigdit.profile.request import request_for
from bigdit.profile.lanes import WorkerError, WorkerKilled
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.best import search
from bigdit.search.finding.candidates import Candidate, capacity
from bigdit.profile.cards import NO_CARDS, Cards, Device
from bigdit.search.finding.confirm import Confirmed
from bigdit.search.finding.evidence import Evidence, weighed
from bigdit.search.finding.limits import Limits, bucket_limits, limits_on
from bigdit.search.needs.dataset import dataset_need, encoding_request
from bigdit.search.needs.host import uncounted
from bigdit.search.needs.schedule import run
from bigdit.search.plan import BucketLimit, DatasetNeed, Plan, Run, Step
from bigdit.search.predict.anchors import Sample, shallowest
from bigdit.search.question import Question
from bigdit.search.telling.averages import averages
from bigdit.search.telling.choices import confirmed, front, step_on, title
from bigdit.search.telling.curves import Runs, curves, runs
from bigdit.search.telling.fixes import fixes
from bigdit.search.telling.settings import settings
from bigdit.search.telling.smaller import smaller
from bigdit.search.telling.waterfall import waterfall
from bigdit.spec import BatchShape, Strategy
from bigdit.speed.seconds import StepTime
from bigdit.units import how_many

Progress = Callable[[str], None]


def made(question: Question, own: Sequence[Receipt], say: Progress) -> tuple[Plan, bool]:
    """The plan for `question`, by the card's `own` receipts; and whether it may be kept: what took too long or could
    not be run may be this minute's, as on a busy machine. `say` is told what is going on, in a line.

    Raises UserError where the model cannot be rehearsed.
    """
    began = time.perf_counter()
    stages = _Stages(f"planning the training of {question.model.name}", say)

    def done(answered: int, asked: int) -> None:
        stages.count(f"{answered} of {how_many(asked, 'rehearsal')}")

    def tried(attempts: int) -> None:
        stages.count(f"{how_many(attempts, 'attempt')} on emulated cards")

    with Pool(done=done) as pool, _device(question, tried) as device:
        with nullcontext() if question.model.params else _of_own(question.model.name):
            if question.model.params is None:
                _check_own(pool, question)
            stages.begin("which engines and settings fit")
            evidence, more = weighed(pool, question, own)
            plan = _plan(pool, question, evidence, device, stages.begin)
        unanswered = [f"not run on an emulated card: {why}" for why in device.unanswered]
    seconds = round(time.perf_counter() - began, 3)
    no_cards = [f"not run on emulated cards: {question.no_cards}"] if question.no_cards else []
    plan = plan.model_copy(update={"seconds": seconds}).noted([*more, *no_cards, *unanswered])
    return plan, not unanswered and not pool.late


class _Stages:
    """What is told while a plan is made: a stage when it begins, and what was counted since, in parentheses."""

    def __init__(self, what: str, say: Progress) -> None:
        self._what, self._say, self._stage = what, say, ""

    def begin(self, stage: str) -> None:
        self._stage = stage
        self._say(f"{self._what}: {stage}")

    def count(self, counted: str) -> None:
        self._say(f"{self._what}: {self._stage} ({counted})")


@contextmanager
def _of_own(name: str) -> Iterator[None]:
    """Tell what is wrong with a user's own model by its name: an argument, or that what they make fails in a step."""
    try:
        yield
    except UserError as error:
        raise UserError(*(problem.replace("model.kwargs.", f"{name}: ", 1) for problem in error.problems)) from None
    except WorkerKilled:
        raise
    except WorkerError as error:
        said = [line for line in str(error).splitlines() if re.match(r"\w+Error: ", line)]
        if not said:
            raise
        reason = said[-1][:300].rstrip(".")
        raise UserError(
            f"{name}: a step of it ends with {reason}; its arguments, such as widths, may not go together; where they "
            "do, this is a bug in bigdit"
        ) from error


def _check_own(pool: Pool, question: Question) -> None:
    """Raise UserError where a user's own model, whose arguments nobody has tried, cannot be made of them."""
    strategy = Strategy(precision="fp32")  # which every card has: none is run
    model, size = question.model, question.resolution
    pool.check_model(request_for(model, question.gpu, strategy, resolution=size, frames=question.frames))


def _device(question: Question, done: Callable[[int], None]) -> AbstractContextManager[Device]:
    if question.device != "emulated":
        return nullcontext(NO_CARDS)
    return Cards(question.gpu, shallow=partial(shallowest, question.model), done=done)


def _plan(pool: Pool, question: Question, evidence: Evidence, device: Device, begin: Progress) -> Plan:
    sample = Sample(question.model, question.gpu, question.resolution, question.frames)
    batch = batch_shape(question.model, question.resolution, question.frames)

    limits: dict[str, Limits] = {}

    def ahead(best: Candidate) -> None:
        limits[title(best)] = limits_on(
            device, sample, question, best, capacity(question, best.option.proposal, evidence)
        )

    found = search(pool, sample, question, evidence, device, ahead)
    asked, question = question, found.question
    chosen = found.best[0]
    known = [confirmed(question, each, evidence) for each in found.best]
    option, answer = chosen.candidate.option, chosen.answer
    fits = chosen.verdict != "DOES NOT FIT"
    room = capacity(question, option.proposal, evidence)
    rooms = [capacity(question, each.proposal, evidence) for each in found.options]
    begin("the fastest alternatives")
    rows = front(sample, question, found.options, known, rooms, evidence, device)
    steps, notices = _explained(pool, sample, question, evidence, chosen, device)
    buckets: tuple[BucketLimit, ...] = ()
    ran: Runs = {}
    if not question.short_of_host(chosen.host.node_bytes):  # else no micro-batch fits
        begin("the largest micro-batches")
        if known[0].title not in limits:
            ahead(chosen.candidate)
        buckets = bucket_limits(pool, sample, question, chosen.candidate, room, limits[known[0].title])
        ran = runs(sample, chosen.candidate, buckets[0], room, device)
    begin("other settings")
    build = device.build if chosen.ran else None
    every = [*found.options, *averages(pool, sample, question, found.options, option)]
    return Plan(
        question=asked,
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
        buckets=buckets,
        curves=curves(question, chosen.candidate, evidence.band, ran),
        settings=settings(sample, question, every, found.best, rows, ran, evidence),
        smaller=smaller(question, chosen.candidate, evidence),
        fixes=()
        if fits
        else fixes(pool, sample, question, evidence, known[0], partial(step_on, question, chosen), device),
        dataset=_dataset(pool, question, batch),
        run=_run(question, known[0].strategy, known[0].step),
        waterfall=steps,
        calibration=evidence.said(known[0].strategy),
        notices=(*_unverified(question.model), *uncounted(question.samples), *answer.notices, *notices),
        versions=answer.versions | ({} if build is None else {"torch": build.split()[0]}),
        emulated=build,
        catalogue=revision(),
        seconds=1.0,
    )


def _unverified(model: CatalogModel) -> tuple[str, ...]:
    """What of the model was assumed or not verified, as a plan says it."""
    return () if model.unverified is None else (f"not verified of {model.name}: {model.unverified}",)


def _explained(
    pool: Pool, sample: Sample, question: Question, evidence: Evidence, chosen: Confirmed, device: Device
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """The waterfall where it is wanted, or a notice of what on the way to `chosen` could not be rehearsed."""
    if not question.explain:
        return (), ()
    try:
        return waterfall(pool, sample, question, evidence, chosen, device), ()
    except UserError as error:
        return (), (f"the way to the recommended setting is not shown: {error}",)


def _dataset(pool: Pool, question: Question, batch: BatchShape) -> DatasetNeed | None:
    if question.images is None:
        return None
    request = encoding_request(question, batch)
    sizes = () if request is None else request.micro_batch_sizes
    asked = [request.model_copy(update={"micro_batch_sizes": (size,)}) for size in sizes if request is not None]
    found = [answer for answer in pool.rehearse(asked) if not isinstance(answer, UserError)]
    return dataset_need(question, batch, found if len(found) == len(asked) else [])


def _run(question: Question, strategy: Strategy, step: StepTime) -> Run | None:
    if question.images is None:
        return None
    return run(
        question.images - question.held_out,
        question.epochs,
        strategy.global_batch_size,
        step,
        question.cluster.gpus,
        question.price,
    )
