"""The largest micro-batch of each size in pixels, and memory against the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigdit.rehearse.pool import Pool
from bigdit.search.anchors import Sample
from bigdit.search.candidates import LARGEST_MICRO_BATCH, Candidate, Option, beside, largest_micro_batch
from bigdit.search.explore import explore
from bigdit.search.plan import BucketLimit, Curve
from bigdit.search.question import Question
from bigdit.search.space import Proposal

MOST_POINTS = 40


def bucket_limits(
    pool: Pool, sample: Sample, question: Question, chosen: Candidate, capacity_bytes: float
) -> tuple[BucketLimit, ...]:
    """The planned size and the question's further ones, with the chosen strategy.

    A bucket of another area than the planned one is rehearsed as that was, and those between are interpolated: the
    flash and linear attention of these models take memory in proportion to the tokens.
    """
    option, blocks = chosen.option, chosen.blocks
    planned = question.resolution
    sizes = (planned, *question.buckets)
    area = planned[0] * planned[1]
    farthest = max(sizes, key=lambda size: abs(size[0] * size[1] - area))
    other = option
    if farthest[0] * farthest[1] != area:
        alone = Proposal(option.proposal.title, option.proposal.strategy)
        found, _ = explore(pool, replace(sample, resolution=farthest), [alone])
        if not found:
            return ()
        other = replace(found[0], corrections=option.corrections)
    limits = []
    for height, width in sizes:
        share = (height * width - area) / ((farthest[0] * farthest[1] - area) or 1)
        none, recommended, full = (
            _largest(option, other, share, each, capacity_bytes) for each in (0, blocks, option.arrangement.count)
        )
        limits.append(BucketLimit(height=height, width=width, none=none, recommended=recommended, full=full))
    return tuple(limits)


def _largest(option: Option, other: Option, share: float, blocks: int, capacity_bytes: float) -> int:
    """As `largest_micro_batch`, `share` of the way from `option` to `other`."""
    if other is option:
        return largest_micro_batch(option, blocks, capacity_bytes)
    low, high = 0, LARGEST_MICRO_BATCH
    while low < high:
        middle = (low + high + 1) // 2
        reserved = (1 - share) * option.reserved(middle, blocks) + share * other.reserved(middle, blocks)
        low, high = (middle, high) if reserved <= capacity_bytes else (low, middle - 1)
    return low


def curves(question: Question, chosen: Candidate, labels: Mapping[int, str]) -> tuple[Curve, ...]:
    """The process's bytes against the micro-batch, to a little beyond the card: one curve for each number of
    checkpointed blocks, with its label."""
    option, limit = chosen.option, question.gpu.usable_bytes
    more = beside(question, option.proposal.strategy).high_bytes
    found = []
    for blocks, label in sorted(labels.items()):
        last = largest_micro_batch(option, blocks, limit * 1.15 - more)
        step = max(last // MOST_POINTS, 1)
        sizes = tuple(dict.fromkeys([*range(1, max(last, 1), step), max(last, 1)]))
        taken = tuple(max(round(option.reserved(size, blocks)) + more, 0) for size in sizes)
        found.append(Curve(label=label, micro_batch_sizes=sizes, process_bytes=taken))
    return tuple(found)
