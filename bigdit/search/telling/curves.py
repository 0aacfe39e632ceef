"""The process's bytes against the micro-batch: as far as it ran, and predicted a little beyond the card."""

from __future__ import annotations

from dataclasses import replace

from bigdit.search.finding.candidates import Candidate, beside, largest_micro_batch
from bigdit.profile.cards import Device
from bigdit.search.finding.confirm import recorded
from bigdit.search.finding.verdict import process
from bigdit.search.plan import Band, BucketLimit, Curve
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Question

MOST_POINTS = 40

BEYOND = 1.15
"""Of the card's bytes: how far curves go."""


Runs = dict[int, dict[int, int]]
"""What torch reserved, by the number of recomputed blocks and the micro-batch size."""


def runs(sample: Sample, chosen: Candidate, limit: BucketLimit, capacity_bytes: float, device: Device) -> Runs:
    """On the device the powers of four to the `limit` and that itself, in the `capacity_bytes` in which it was found:
    with no block, the chosen number of them and all recomputed; each to the first that could not be run."""
    if not limit.ran:
        return {}
    largest = {chosen.blocks: limit.recommended, 0: limit.none, chosen.option.arrangement.count: limit.full}
    places = [(blocks, size) for blocks, most in largest.items() for size in _sizes(most)]
    requests = [recorded(sample, replace(chosen, blocks=blocks, micro_batch_size=size)) for blocks, size in places]
    attempts = device.run([(request, int(capacity_bytes)) for request in requests], to_end=False)
    found: Runs = {blocks: {} for blocks in largest}
    short = set[int]()
    for (blocks, size), attempt in zip(places, attempts, strict=True):
        if attempt is None or not attempt.fits:
            short.add(blocks)
        elif blocks not in short:
            found[blocks][size] = attempt.peak_reserved_bytes
    return found


def curves(question: Question, chosen: Candidate, band: Band, runs: Runs) -> tuple[Curve, ...]:
    """One curve for each number of checkpointed blocks: none, the recommended, all. What is beyond the `runs` is
    predicted."""
    option, count = chosen.option, chosen.option.arrangement.count
    around = beside(question, option.proposal.strategy)
    labels = {chosen.blocks: f"{chosen.blocks} of {count} blocks", 0: "nothing recomputed"}
    found = []
    for blocks, label in sorted((labels | {count: "all blocks recomputed"}).items()):
        if blocks < option.least_blocks:
            continue
        ran = runs.get(blocks, {})
        last = largest_micro_batch(option, blocks, question.gpu.usable_bytes * BEYOND - around.high_bytes)
        beyond = [size for size in _evenly(last) if size > max(ran, default=0)]
        reserved = ran | {size: max(round(option.reserved(size, blocks)), 0) for size in beyond}
        found.append(
            Curve(
                label=label,
                micro_batch_sizes=tuple(reserved),
                process_bytes=tuple(process(taken, around, band).high_bytes for taken in reserved.values()),
                ran=len(ran),
            )
        )
    return tuple(found)


def _sizes(largest: int) -> list[int]:
    return sorted({largest, *(1 << power for power in range(0, largest.bit_length(), 2))} - {0})


def _evenly(last: int) -> list[int]:
    last = max(last, 1)
    return [*range(1, last, max(last // MOST_POINTS, 1)), last]
