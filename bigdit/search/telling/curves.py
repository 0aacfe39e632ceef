"""The process's bytes against the micro-batch, as steps ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigdit.profile.attempt import UNLIMITED, Attempt
from bigdit.search.finding.candidates import Candidate, Planner
from bigdit.search.finding.verdict import process
from bigdit.search.plan import BucketLimit, Curve

Runs = Mapping[int, Mapping[int, Attempt]]
"""Attempts by the number of recomputed blocks and the micro-batch size."""


def runs(planner: Planner, chosen: Candidate, limit: BucketLimit) -> Runs:
    """The sizes up to the `limit` that ran, with no block, the chosen number of them and all recomputed: two of each at
    least, where so many fit."""
    largest = {chosen.blocks: limit.recommended, 0: limit.none, chosen.option.arrangement.count: limit.full}
    places = [
        (blocks, size)
        for blocks, most in largest.items()
        for size in _two_at_least([size for size in chosen.option.ran(blocks) if size <= (most or 0)])
    ]
    strategies = [replace(chosen, blocks=blocks, micro_batch_size=size).strategy for blocks, size in places]
    attempts = planner.cards.attempts([(planner.request(each), UNLIMITED) for each in strategies])
    found: dict[int, dict[int, Attempt]] = {blocks: {} for blocks in largest}
    for (blocks, size), attempt in zip(places, attempts, strict=True):
        if isinstance(attempt, Attempt):
            found[blocks][size] = attempt
    return found


def _two_at_least(sizes: list[int]) -> list[int]:
    return sorted({*sizes, 1} if len(sizes) == 1 else sizes)


def curves(planner: Planner, chosen: Candidate, ran: Runs) -> tuple[Curve, ...]:
    """One curve for each number of recomputed blocks: none, the recommended, all."""
    count, around = chosen.option.arrangement.count, planner.non_torch(chosen.strategy)
    labels = {chosen.blocks: f"{chosen.blocks} of {count} blocks", 0: "nothing recomputed"}
    return tuple(
        Curve(
            label=label,
            micro_batch_sizes=tuple(ran[blocks]),
            process_bytes=tuple(
                process(each.peak_reserved_bytes, around, planner.band).high_bytes for each in ran[blocks].values()
            ),
        )
        for blocks, label in sorted((labels | {count: "all blocks recomputed"}).items())
        if ran.get(blocks)
    )
