"""The largest micro-batch of each size in pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from bigdit.rehearse import StepRequest
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import Candidate, Option, largest_micro_batch, most
from bigdit.profile.cards import Device, Row
from bigdit.search.finding.confirm import recorded
from bigdit.search.finding.explore import explore
from bigdit.search.finding.space import Proposal
from bigdit.search.plan import BucketLimit
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Question

NEAR = 0.05
"""Buckets of an area within this share of the planned one are not rehearsed: what a sample takes is scaled with the
area, though its text stays, which is off by this share of the text's part."""


Limits = dict[tuple[int, int], BucketLimit]
"""By the size in pixels."""


def bucket_limits(
    pool: Pool, sample: Sample, question: Question, chosen: Candidate, capacity_bytes: float, ran: Limits
) -> tuple[BucketLimit, ...]:
    """The planned size and the question's further ones, with the chosen strategy: as they `ran` on a device, or else as
    they are predicted."""
    sizes = (question.resolution, *question.buckets)
    if all(size in ran for size in sizes):
        return tuple(ran[size] for size in sizes)
    predicted = _predicted(pool, sample, question, chosen, capacity_bytes)
    return tuple(ran.get((each.height, each.width), each) for each in predicted)


def limits_on(device: Device, sample: Sample, question: Question, chosen: Candidate, capacity_bytes: float) -> Limits:
    """The limits of each size as cards have them, looked for from what is predicted of the planned size; without those
    of which one could not be run."""
    columns = _columns(chosen)
    sizes, planned = (question.resolution, *question.buckets), _area(question.resolution)

    def request(size: tuple[int, int], blocks: int, micro_batch_size: int) -> StepRequest:
        candidate = replace(chosen, micro_batch_size=micro_batch_size, blocks=blocks)
        return recorded(replace(sample, resolution=size), candidate)

    def largest(blocks: int) -> dict[tuple[int, int], int | None]:
        """Of each size, from what is predicted of the planned one, and then from what ran last, by their pixels."""
        if blocks < chosen.option.least_blocks:
            return dict.fromkeys(sizes, 0)
        expected = largest_micro_batch(chosen.option, blocks, capacity_bytes)
        pixels, pixel_bytes = float(expected * planned), _sample_bytes(chosen.option, expected, blocks) / planned
        limits: dict[tuple[int, int], int | None] = {}
        for size in sizes:
            turned = limits.get(size[::-1])
            if turned and alike(blocks, turned, size):
                limits[size] = turned
                continue
            row = Row(partial(request, size, blocks), pixels / _area(size), pixel_bytes * _area(size))
            (found,) = device.largest([row], int(capacity_bytes))
            limits[size] = None if found is None else int(found)
            pixels = pixels if found is None else found * _area(size)
        return limits

    def alike(blocks: int, micro_batch_size: int, size: tuple[int, int]) -> bool:
        """Whether so many take the same memory, to the byte, as of pictures turned by a quarter, of which one more does
        not fit."""
        both = [(request(each, blocks, micro_batch_size), int(capacity_bytes)) for each in (size, size[::-1])]
        one, other = device.run(both, to_end=False)
        return one is not None and other is not None and one.fits and one.memory == other.memory

    rows = [*dict.fromkeys(columns.values())]
    with ThreadPoolExecutor(len(rows)) as aside:  # none waits for another's size
        ran = dict(zip(rows, aside.map(largest, rows), strict=True))
    found = {size: {column: ran[blocks][size] for column, blocks in columns.items()} for size in sizes}
    return {size: _limit(size, limits, ran=True) for size, limits in found.items() if None not in limits.values()}


def _limit(size: tuple[int, int], columns: Mapping[str, int | None], *, ran: bool) -> BucketLimit:
    return BucketLimit.model_validate({"height": size[0], "width": size[1], "ran": ran, **columns})


def _columns(chosen: Candidate) -> dict[str, int]:
    """The numbers of recomputed blocks that limits are shown of."""
    return {"none": 0, "recommended": chosen.blocks, "full": chosen.option.arrangement.count}


def _predicted(
    pool: Pool, sample: Sample, question: Question, chosen: Candidate, capacity_bytes: float
) -> Iterator[BucketLimit]:
    """The bucket farthest from the planned area is rehearsed as that was, and those between are interpolated: the flash
    and linear attention of these models take memory in proportion to the tokens."""
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
        if blocks < option.least_blocks:
            return 0
        return most(lambda micro_batch_size: reserved(size, micro_batch_size, blocks) <= capacity_bytes)

    for size in sizes:
        yield _limit(size, {column: largest(size, blocks) for column, blocks in _columns(chosen).items()}, ran=False)


def _sample_bytes(option: Option, micro_batch_size: int, blocks: int) -> float:
    """About what one more takes there."""
    size = max(micro_batch_size, 2)
    return max((option.reserved(size, blocks) - option.reserved(size / 2, blocks)) / (size / 2), 1)


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]
