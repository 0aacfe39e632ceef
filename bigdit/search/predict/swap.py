"""Weights of the first blocks on the host: what siblings spare with those of all blocks there, for any number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bigdit.memory.host import host_memory
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.search.predict.anchors import SIZES, Grid, Sample, grid, weighted
from bigdit.search.predict.moments import Bytes, moments
from bigdit.search.predict.outline import Arrangement, Outline, level
from bigdit.search.predict.sibling import block_count
from bigdit.spec import Strategy
from bigdit.speed.work import Work, work_of


@dataclass(frozen=True)
class Swapping:
    """What differs in each sibling of the `grid` once all of its blocks are swapped: bytes of the device by category,
    the host's peaks (HostMemory.saving), and the work of a step.

    There is room for two blocks from the start of a step to its end, and each block takes its own weights away: all of
    it is affine in the number of swapped blocks, whatever blocks there are beside them. But for the host: where there
    are such, they have left it before the others are locked, of which a GiB at once is there twice, and counts here.
    """

    grid: Grid
    parts: tuple[Bytes, ...]
    host: tuple[Bytes, ...]
    work: tuple[Work, ...]

    def of(self, arrangement: Arrangement, first: int) -> Arrangement:
        """`arrangement` with weights of the `first` blocks on the host."""
        weights = self.grid.weights_of(_lengths(arrangement, first))
        parts = np.tensordot(weights, np.stack(self.parts), 1)
        host, work = np.tensordot(weights, np.stack(self.host), 1), weighted(self.work, weights)

        def moved(outline: Outline) -> Outline:
            start, slope = outline.work
            return replace(
                outline,
                live=tuple(each + level(parts.sum()) for each in outline.live),
                parts=tuple(each + level(parts[:, None]) for each in outline.parts),
                work=(start + work, slope),
                host=outline.host + level(host),
            )

        return replace(arrangement, none=moved(arrangement.none), full=moved(arrangement.full))


def swapping_requests(sample: Sample, strategy: Strategy) -> list[StepRequest]:
    """What `swapping` needs: every sibling with all blocks recomputed, as its anchors were rehearsed, and then with all
    of them swapped too."""
    plain = strategy.with_micro_batch_size(SIZES[0]).model_copy(update={"checkpointed_blocks": "all"})
    siblings = grid(sample.model).siblings
    counts = [*(0 for _ in siblings), *map(block_count, siblings)]
    return [
        sample.request(plain.model_copy(update={"blocks_to_swap": count}), each)
        for count, each in zip(counts, siblings * 2, strict=True)
    ]


def swapping(sample: Sample, strategy: Strategy, answers: Sequence[RehearsedSize]) -> Swapping:
    """From the answers to `swapping_requests`."""
    timelines = [answer.timeline for answer in answers]
    left = [moments(timeline)[-1].parts[:, -1] for timeline in timelines]
    host = [np.asarray(host_memory(answer.host_timeline).saving(answer.checkpoint_bytes)) for answer in answers]
    work = [work_of(timeline, strategy) for timeline in timelines]
    pairs = [(at, at + len(answers) // 2) for at in range(len(answers) // 2)]
    return Swapping(
        grid=grid(sample.model),
        parts=tuple(left[swapped] - left[plain] for plain, swapped in pairs),
        host=tuple(host[swapped] - host[plain] for plain, swapped in pairs),
        work=tuple(work[swapped] - work[plain] for plain, swapped in pairs),
    )


def _lengths(arrangement: Arrangement, first: int) -> dict[str, int]:
    """How many of each list are among the first blocks."""
    found, left = {}, first
    for name, length in arrangement.blocks:
        found[name] = min(left, length)
        left -= found[name]
    return found
