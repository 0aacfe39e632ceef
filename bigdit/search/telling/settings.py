"""What a page may be asked further: each option at a grid of sizes, as it ran or as its anchors predict it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bigdit.catalog.gpus import gpus
from bigdit.memory import Category, Ledger
from bigdit.search.finding.candidates import (
    Candidate,
    Option,
    beside,
    candidate,
    largest_micro_batch,
    micro_batch_sizes,
)
from bigdit.search.finding.confirm import Confirmed
from bigdit.search.finding.evidence import Evidence
from bigdit.search.plan import Choice, Point, Room, Setting, alike
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Question
from bigdit.search.telling.choices import as_run, predicted
from bigdit.search.telling.choices import title as title_of
from bigdit.search.telling.curves import BEYOND, Runs
from bigdit.spec import Strategy

MOST_SIZES = 7
"""Micro-batch sizes of an option, beside those that ran: some hundreds of points in all, and a page below 1 MB."""


def settings(
    sample: Sample,
    question: Question,
    options: Sequence[Option],
    best: Sequence[Confirmed],
    rows: Sequence[Choice],
    runs: Runs,
    evidence: Evidence,
) -> tuple[Setting, ...]:
    """Each option with its points: those of `rows` as they were found, those of the `runs` of the first of the `best`
    as they ran, the others predicted; and by category as the `best` were rehearsed."""
    known = {row.title: row for row in rows if not row.predicted}
    rehearsed = {title_of(each.candidate): each.answer.ledger for each in best}
    own = best[0].candidate.option
    allowed = {*micro_batch_sizes(question, own.proposal.strategy)}  # curves go on beyond a global batch
    for count, reserved in runs.items():
        for size, nbytes in reserved.items():
            if size not in allowed:
                continue
            ran = candidate(question, own, size, count, evidence)
            choice = as_run(question, predicted(question, ran, evidence), nbytes, "FITS", evidence)
            known.setdefault(choice.title, choice)

    found = []
    for option in options:
        strategy = option.proposal.strategy
        cards = rooms(sample, question, strategy)
        around = beside(question, strategy)
        most = BEYOND * (max(room.usable_bytes for room in cards) - around.high_bytes)
        wanted = [best[0].candidate.strategy, *(row.strategy for row in known.values() if _beside(strategy, row))]
        blocks = _blocks(question, option, wanted)
        sizes = _sizes(question, option, max(blocks), most, wanted)
        places = [candidate(question, option, size, count, evidence) for size in sizes for count in blocks]
        points = tuple(_point(question, place, known, rehearsed, evidence) for place in places)
        found.append(Setting(title=option.proposal.title, strategy=strategy, beside=around, rooms=cards, points=points))
    return tuple(found)


def _beside(strategy: Strategy, row: Choice) -> bool:
    """Whether a choice is the strategy at sizes of its own, but for the average."""
    return alike(strategy.model_copy(update={"ema": row.strategy.ema}), row.strategy)


def _point(
    question: Question,
    place: Candidate,
    known: Mapping[str, Choice],
    rehearsed: Mapping[str, Ledger],
    evidence: Evidence,
) -> Point:
    title = title_of(place)
    choice = known.get(title) or predicted(question, place, evidence)
    phase, at_peak = _deciding(rehearsed[title]) if title in rehearsed else _predicted(place)
    return Point(
        micro_batch_size=place.micro_batch_size,
        checkpointed_blocks=place.blocks,
        found="run" if choice.ran else "rehearsed" if choice.confirmed else "predicted",
        phase=phase,
        at_peak=at_peak,
        at_peak_rehearsed=title in rehearsed,
        peak_reserved_bytes=choice.peak_reserved_bytes,
        process=choice.process,
        host_bytes=choice.host_bytes,
        verdict="DOES NOT FIT" if question.short_of_host(choice.host_bytes) else choice.verdict,
        samples_per_second_per_card=choice.samples_per_second_per_card,
    )


def _predicted(place: Candidate) -> tuple[str, dict[Category, int]]:
    return place.option.arrangement.at_peak(place.micro_batch_size, place.blocks)


def _deciding(ledger: Ledger) -> tuple[str, dict[Category, int]]:
    return ledger.deciding.phase, ledger.at_peak


def rooms(sample: Sample, question: Question, strategy: Strategy) -> tuple[Room, ...]:
    """The question's card, and those of which a rehearsal's question is the same to the letter: they run the same
    kernels with the same scratch memory, beside a context as large."""
    own = question.gpu
    asked = sample.request(strategy)
    alike = (
        gpu.reserving()
        for gpu in gpus()
        if (gpu.compute_capability, gpu.multiprocessors) == (own.compute_capability, own.multiprocessors)
        and gpu.name != own.name
        and replace(sample, gpu=gpu).request(strategy) == asked
    )
    return tuple(Room(card=gpu.title, usable_bytes=gpu.usable_bytes) for gpu in (own, *alike))


def _blocks(question: Question, option: Option, wanted: Iterable[Strategy]) -> list[int]:
    """None to all in quarters, and those of the strategies that are `wanted`; the pinned number alone where there is
    one."""
    count, pinned = option.arrangement.count, question.pins.checkpointed_blocks
    if pinned is not None:
        return [count if pinned == "all" else pinned]
    counts = {count if each.checkpointed_blocks == "all" else each.checkpointed_blocks for each in wanted}
    return sorted({*option.quarters} | {each for each in counts if each >= option.least_blocks})


def _sizes(question: Question, option: Option, blocks: int, most_bytes: float, wanted: Iterable[Strategy]) -> list[int]:
    """MOST_SIZES of the search's own, evenly on a logarithmic scale, to the largest of which torch reserves
    `most_bytes` with so many blocks recomputed; and those of the strategies that are `wanted`."""
    own = list(micro_batch_sizes(question, option.proposal.strategy))
    last = max(largest_micro_batch(option, blocks, most_bytes), own[0])
    within = [size for size in own if size <= last]
    steps = (math.log(within[-1] / within[0]) * at / (MOST_SIZES - 1) for at in range(MOST_SIZES))
    even = {min(within, key=lambda size: abs(math.log(size / within[0]) - step)) for step in steps}
    return sorted(even | ({each.micro_batch_size for each in wanted} & {*own}))
