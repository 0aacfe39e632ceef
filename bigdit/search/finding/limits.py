"""The largest micro-batch of each size in pixels, as it ran: one more does not fit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from bigdit.profile.attempt import Attempt
from bigdit.profile.cards import Row
from bigdit.profile.request import StepRequest
from bigdit.search.finding.candidates import Candidate, Option, Planner, largest_micro_batch
from bigdit.search.plan import BucketLimit

Limits = dict[tuple[int, int], BucketLimit]
"""By the size in pixels."""


def limits_of(planner: Planner, chosen: Candidate) -> Limits:
    """The limits of each size, looked for from what is predicted of the planned one; without those of which an attempt
    failed."""
    question, capacity_bytes = planner.question, planner.capacity(chosen.strategy)
    columns = {"none": 0, "recommended": chosen.blocks, "full": chosen.option.arrangement.count}
    sizes, planned = (question.resolution, *question.buckets), _area(question.resolution)

    def request(size: tuple[int, int], blocks: int, micro_batch_size: int) -> StepRequest:
        tried = replace(chosen, micro_batch_size=micro_batch_size, blocks=blocks)
        return planner.request(tried.strategy, size)

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
            (found,) = planner.cards.largest([row], capacity_bytes)
            limits[size] = None if found is None else int(found)
            pixels = pixels if found is None else found * _area(size)
        return limits

    def alike(blocks: int, micro_batch_size: int, size: tuple[int, int]) -> bool:
        """Whether so many take the same memory, to the byte, as of pictures turned by a quarter, of which one more does
        not fit."""
        both = [(request(each, blocks, micro_batch_size), capacity_bytes) for each in (size, size[::-1])]
        one, other = planner.cards.attempts(both, to_end=False)
        if not isinstance(one, Attempt) or not isinstance(other, Attempt):
            return False
        return one.fits and one.memory == other.memory

    rows = [*dict.fromkeys(columns.values())]
    with ThreadPoolExecutor(len(rows)) as aside:  # none waits for another's size
        ran = dict(zip(rows, aside.map(largest, rows), strict=True))
    found = {size: {column: ran[blocks][size] for column, blocks in columns.items()} for size in sizes}
    return {
        size: BucketLimit.model_validate({"height": size[0], "width": size[1], **limits})
        for size, limits in found.items()
        if None not in limits.values()
    }


def _sample_bytes(option: Option, micro_batch_size: int, blocks: int) -> float:
    """About what one more takes there."""
    size = max(micro_batch_size, 2)
    return max((option.reserved(size, blocks) - option.reserved(size / 2, blocks)) / (size / 2), 1)


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]
