"""The largest micro-batch of each size in pixels, as it ran: one more does not fit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from bigdit.profile.cards import Row
from bigdit.profile.request import StepRequest
from bigdit.search.finding.candidates import Candidate, Option, Planner, largest_micro_batch
from bigdit.search.plan import BucketLimit

Limits = dict[tuple[int, int], BucketLimit]
"""By the size in pixels."""

NEAR = 0.05
"""Of a size whose area is within this share of the planned one, with nothing and with all blocks recomputed, about as
many fit as of that: they are not looked for."""


def limits_of(planner: Planner, chosen: Candidate) -> Limits:
    """The limits of each size, looked for from what is predicted of the planned one; without those of which an attempt
    failed."""
    question, capacity_bytes = planner.question, planner.capacity(chosen.strategy)
    columns = {"none": 0, "recommended": chosen.blocks, "full": chosen.option.arrangement.count}
    sizes, planned = (question.resolution, *question.buckets), _area(question.resolution)

    def request(size: tuple[int, int], blocks: int, micro_batch_size: int) -> StepRequest:
        tried = replace(chosen, micro_batch_size=micro_batch_size, blocks=blocks)
        return planner.request(tried.strategy, size)

    def wanted(size: tuple[int, int], blocks: int) -> bool:
        near = size != question.resolution and abs(_area(size) / planned - 1) <= NEAR
        return not near or blocks == chosen.blocks

    def largest(blocks: int) -> dict[tuple[int, int], int | None]:
        """Of each size, from what is predicted of the planned one, and then from what ran last, by their pixels."""
        if blocks < chosen.option.least_blocks:
            return dict.fromkeys(sizes, 0)
        expected = largest_micro_batch(chosen.option, blocks, capacity_bytes)
        pixels, pixel_bytes = float(expected * planned), _sample_bytes(chosen.option, expected, blocks) / planned
        limits: dict[tuple[int, int], int | None] = {}
        for size in sizes:
            if not wanted(size, blocks):
                continue
            if size[::-1] in limits:  # turned by a quarter, the same samples take the same bytes
                limits[size] = limits[size[::-1]]
                continue
            known = chosen.option.ran(blocks) if size == question.resolution else {}
            row = Row(partial(request, size, blocks), pixels / _area(size), pixel_bytes * _area(size), known)
            found = planner.cards.largest(row, capacity_bytes)
            limits[size] = None if found is None else int(found[0])
            if found is not None:
                pixels = found[0] * _area(size)
                if size == question.resolution:
                    chosen.option.note(blocks, found[1])
        return limits

    rows = [*dict.fromkeys(columns.values())]
    with ThreadPoolExecutor(len(rows)) as aside:  # none waits for another's size
        ran = dict(zip(rows, aside.map(largest, rows), strict=True))
    found = {size: {column: ran[blocks].get(size) for column, blocks in columns.items()} for size in sizes}
    return {
        size: BucketLimit.model_validate({"height": size[0], "width": size[1], **limits})
        for size, limits in found.items()
        if limits["recommended"] is not None
    }


def _sample_bytes(option: Option, micro_batch_size: int, blocks: int) -> float:
    """About what one more takes there."""
    size = max(micro_batch_size, 2)
    return max((option.reserved(size, blocks) - option.reserved(size / 2, blocks)) / (size / 2), 1)


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]
