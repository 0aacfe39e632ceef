"""A plan is made: search, and say what was found and what it means."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from bigdit.catalog import FAMILIES, batch_shape
from bigdit.catalog.names import revision
from bigdit.profile.attempt import UNLIMITED, Attempt
from bigdit.profile.cards import Cards
from bigdit.receipt import Receipt
from bigdit.search.calibration import Evidence, check
from bigdit.search.candidates import Candidate, Planner
from bigdit.search.dataset import dataset_need, encoding_requests
from bigdit.search.explain import fixes, waterfall
from bigdit.search.explore import Limits, limits_of
from bigdit.search.plan import DatasetNeed, Plan, Run, uncounted
from bigdit.search.question import Question
from bigdit.search.rows import Runs, as_ran, curves, front, runs, settings, smaller, title
from bigdit.search.solve import search
from bigdit.speed.seconds import StepTime
from bigdit.strategy import BatchShape, Strategy
from bigdit.units import how_many


def made(question: Question, own: Sequence[Receipt], cards: Cards, say: Callable[[str], None]) -> tuple[Plan, bool]:
    """The plan for `question` by emulated GPUs, and their `own` receipts; and whether it may be cached: what took too
    long or could not be run may be this minute's, as on a busy machine. `say` is told what is going on, in a line.

    Raises UserError where the model has no step.
    """
    began = time.perf_counter()
    stages = _Stages(f"planning the training of {question.model.name}", say)

    def tried(attempts: int) -> None:
        stages.count(how_many(attempts, "attempt"))

    cards.done = tried
    stages.begin("which engines and settings fit")
    checked, more = check(own, question.gpu, cards)
    evidence = Evidence(tuple(checked), routed=FAMILIES[question.model.spec.class_name].routed)
    plan = _plan(Planner(question, cards, evidence), stages)
    unanswered = [f"not run on an emulated GPU: {why}" for why in cards.unanswered]
    seconds = round(time.perf_counter() - began, 3)
    return plan.model_copy(update={"seconds": seconds}).noted([*more, *unanswered]), not unanswered


class _Stages:
    """What is told while a plan is made: a stage when it begins, and what was counted since, in parentheses."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say, self._stage, self._found = what, say, "", ""

    def begin(self, stage: str) -> None:
        self._stage = stage
        self._say(f"{self._what}: {stage}")

    def count(self, counted: str) -> None:
        self._say(f"{self._what}: {self._stage} ({counted}{self._found})")

    def fits(self, best: Candidate) -> None:
        self._found = f"; fits: {title(best)}"


def _plan(planner: Planner, stages: _Stages) -> Plan:
    asked = planner.question
    batch = batch_shape(asked.model, asked.resolution, asked.frames)
    limits: dict[str, Limits] = {}

    def ahead(best: Candidate) -> None:
        stages.fits(best)
        limits[title(best)] = limits_of(planner, best)

    found = search(planner, ahead)
    planner, chosen = found.planner, found.best
    question, answer = planner.question, chosen.answer
    known = as_ran(planner, chosen.ran, chosen)
    fits = chosen.verdict != "DOES NOT FIT"
    stages.begin("the fastest alternatives")
    rows = front(planner, found.options, known)
    unverified = question.model.unverified
    assumed = [] if unverified is None else [f"not verified of {question.model.name}: {unverified}"]
    steps, notices = waterfall(planner, chosen) if question.explain else ((), ())
    ran: Runs = {}
    if not question.short_of_host(chosen.host.node_bytes):  # else no micro-batch fits
        stages.begin("the largest micro-batches")
        if known.title not in limits:
            ahead(chosen.candidate)
        if (largest := limits[known.title].get(question.resolution)) is not None:
            ran = runs(planner, chosen.candidate, largest)
    if not fits:
        stages.begin("what would fit")
    return Plan(
        question=asked,
        params=answer.params,
        batch=batch,
        verdict=chosen.verdict,
        band=planner.band,
        chosen=next(row for row in rows if row.title == known.title),
        ledger=answer.ledger,
        non_torch=planner.non_torch(chosen.candidate.strategy),
        packed_timeline=answer.packed_timeline,
        host=chosen.host,
        front=rows,
        rejected=tuple(found.rejected),
        buckets=tuple(limits.get(known.title, {}).values()),
        curves=curves(planner, chosen.candidate, ran),
        settings=settings(planner, found.options, chosen, rows, ran),
        smaller=smaller(planner, chosen.candidate),
        fixes=() if fits else fixes(planner, known, chosen),
        dataset=_dataset(planner, batch),
        run=_run(question, known.strategy, known.step),
        waterfall=steps,
        calibration=planner.evidence.source(known.strategy),
        notices=(*assumed, *uncounted(question.samples), *answer.notices, *notices),
        versions=answer.versions | {"torch": planner.cards.build.split()[0]},
        emulated=planner.cards.build,
        catalogue=revision(),
        seconds=1.0,
    )


def _dataset(planner: Planner, batch: BatchShape) -> DatasetNeed | None:
    question = planner.question
    if question.images is None:
        return None
    requests = encoding_requests(question)
    attempts = planner.cards.attempts([(request, UNLIMITED) for request in requests.values()])
    found = {samples: each for samples, each in zip(requests, attempts, strict=True) if isinstance(each, Attempt)}
    return dataset_need(question, batch, found if len(found) == len(requests) else {})


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


HOUR = 3600.0


def run(images: int, epochs: float, global_batch_size: int, step: StepTime, gpus: int, price: float | None) -> Run:
    """`images` seen `epochs` times in steps of `global_batch_size`, the last one full too.

    `price` is of one card for an hour; what the cards cost while nothing is trained (reading the first data,
    checkpoints, validation, a queue) is not in it.
    """
    steps = max(1, math.ceil(images * epochs / global_batch_size))
    seconds = step.seconds * steps
    gpu_hours = seconds * (gpus / HOUR)
    return Run(
        steps=steps,
        seconds=seconds,
        gpu_hours=gpu_hours,
        money=None if price is None else gpu_hours * price,
        samples_per_second=step.seconds.per(global_batch_size),
    )
