"""The largest micro-batch of each size in pixels, and memory against the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from bigdit.rehearse import RehearsalRequest
from bigdit.rehearse.pool import Pool
from bigdit.search.candidates import Candidate, beside, largest_micro_batch, most
from bigdit.search.cards import Cards
from bigdit.search.confirm import recorded
from bigdit.search.explore import explore
from bigdit.search.plan import Band, BucketLimit, Curve
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Question
from bigdit.search.space import Proposal
from bigdit.search.verdict import process

MOST_POINTS = 40

NEAR = 0.05
"""Buckets of an area within this share of the planned one are not rehearsed: what a sample takes is scaled with the
area, though its text stays, which is off by this share of the text's part."""


def bucket_limits(
    pool: Pool, sample: Sample, question: Question, chosen: Candidate, capacity_bytes: float, cards: Cards | None = None
) -> tuple[BucketLimit, ...]:
    """The planned size and the question's further ones, with the chosen strategy; the planned one is run on `cards`.

    The bucket farthest from the planned area is rehearsed as that was, and those between are interpolated: the flash
    and linear attention of these models take memory in proportion to the tokens.
    """
    option, planned = chosen.option, _area(question.resolution)
    sizes = (question.resolution, *question.buckets)
    farthest = max(sizes, key=lambda size: abs(_area(size) - planned))
    other = None
    if abs(_area(farthest) / planned - 1) > NEAR:
        alone = Proposal(option.proposal.title, option.proposal.strategy)
        found, _ = explore(pool, replace(sample, resolution=farthest), [alone])
        other = replace(found[0], corrections=option.corrections) if found else None

    def reserved(size: tuple[int, int], micro_batch_size: int, blocks: int) -> float:
        if other is None:
            return option.reserved(micro_batch_size * _area(size) / planned, blocks)
        share = (_area(size) - planned) / (_area(farthest) - planned)
        near, far = (each.reserved(micro_batch_size, blocks) for each in (option, other))
        return (1 - share) * near + share * far

    def largest(size: tuple[int, int], blocks: int) -> int:
        return most(lambda micro_batch_size: reserved(size, micro_batch_size, blocks) <= capacity_bytes)

    count = option.arrangement.count
    others = (
        BucketLimit(
            height=size[0],
            width=size[1],
            none=largest(size, 0),
            recommended=largest(size, chosen.blocks),
            full=largest(size, count),
        )
        for size in question.buckets
    )
    return (planned_limit(sample, question, chosen, capacity_bytes, cards), *others)


def planned_limit(
    sample: Sample, question: Question, chosen: Candidate, capacity_bytes: float, cards: Cards | None
) -> BucketLimit:
    """The planned size's largest micro-batches: run on `cards`, where there are any."""
    height, width = question.resolution
    none, recommended, full = (
        largest_micro_batch(chosen.option, blocks, capacity_bytes)
        for blocks in (0, chosen.blocks, chosen.option.arrangement.count)
    )
    predicted = BucketLimit(height=height, width=width, none=none, recommended=recommended, full=full)
    return predicted if cards is None else _run(cards, sample, chosen, predicted, int(capacity_bytes))


def _run(cards: Cards, sample: Sample, chosen: Candidate, predicted: BucketLimit, capacity_bytes: int) -> BucketLimit:
    """The planned size's limits as cards have them, looked for from the predicted ones, which stay where one of them
    could not be run."""
    columns = {"none": 0, "recommended": chosen.blocks, "full": chosen.option.arrangement.count}
    guesses = {blocks: getattr(predicted, column) for column, blocks in columns.items()}

    def request(blocks: int, size: int) -> RehearsalRequest:
        return recorded(sample, replace(chosen, micro_batch_size=size, blocks=blocks))

    rows = [(partial(request, blocks), guess) for blocks, guess in guesses.items()]
    found = dict(zip(guesses, cards.largest(rows, capacity_bytes), strict=True))
    if None in found.values():
        return predicted
    return predicted.model_copy(update={column: found[blocks] for column, blocks in columns.items()} | {"ran": True})


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def curves(question: Question, chosen: Candidate, band: Band, labels: Mapping[int, str]) -> tuple[Curve, ...]:
    """The process's bytes against the micro-batch, to a little beyond the card: one curve for each number of
    checkpointed blocks, with its label."""
    option, limit = chosen.option, question.gpu.usable_bytes
    around = beside(question, option.proposal.strategy)
    found = []
    for blocks, label in sorted(labels.items()):
        last = largest_micro_batch(option, blocks, limit * 1.15 - around.high_bytes)
        step = max(last // MOST_POINTS, 1)
        sizes = tuple(dict.fromkeys([*range(1, max(last, 1), step), max(last, 1)]))
        taken = tuple(process(max(round(option.reserved(size, blocks)), 0), around, band).high_bytes for size in sizes)
        found.append(Curve(label=label, micro_batch_sizes=sizes, process_bytes=taken))
    return tuple(found)
