"""What the allocator reserves beyond the peak, at any micro-batch size: a shallow sibling's step, replayed."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from bigdit.memory import Timeline
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import UNLIMITED


@dataclass(frozen=True)
class Gap:
    """Of one sibling at two micro-batch sizes or three, in their order: the bytes of each of its blocks grow evenly
    from one to the next.

    How the allocator's pieces fit does not grow evenly, since it serves small, middling and large blocks from other
    segments: so it is replayed at powers of two, and between them taken along a line. A deeper model leaves more pieces
    than its sibling: 20 blocks of Sana 2.1 to 5.3 GiB where nothing is recomputed, 5 of them 0.7 to 4.0; 57 blocks of
    Flux under FSDP2 8.7 GiB, 10 of them 3.1.
    """

    rehearsed: Mapping[int, Timeline]
    known: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def continued(self) -> bool:
        """Whether all sizes allocate and free alike, so that others are continued from them."""
        first, *others = self.rehearsed.values()
        return all(first.events == other.events for other in others)

    def at(self, micro_batch_size: float) -> float:
        """Bytes that torch reserves beyond the allocated peak with expandable segments, on a card without a limit.

        Of sizes that do not allocate and free alike: as at the second one up to there, then along lines between them.
        """
        if not self.continued:
            sizes = [*self.rehearsed][1:]
            return float(np.interp(micro_batch_size, sizes, [self._replayed(size) for size in sizes]))
        low = 1 << max(int(micro_batch_size).bit_length() - 1, 0)
        share = max(micro_batch_size / low - 1, 0.0)
        return (1 - share) * self._replayed(low) + (share * self._replayed(2 * low) if share else 0.0)

    def _replayed(self, micro_batch_size: int) -> float:
        if micro_batch_size not in self.known:
            timeline = self.rehearsed.get(micro_batch_size) or self._timeline(micro_batch_size)
            reserved = replay(timeline, UNLIMITED, expandable_segments=True).peak_reserved_bytes
            self.known[micro_batch_size] = reserved - timeline.peak_allocated_bytes
        return self.known[micro_batch_size]

    def _timeline(self, micro_batch_size: int) -> Timeline:
        """The sibling's, continued from the two rehearsed sizes around that one, or from those next to it; of one size
        nothing grows."""
        sizes = [*self.rehearsed]
        if len(sizes) == 1:
            return self.rehearsed[sizes[0]]
        upper = min(max(bisect.bisect(sizes, micro_batch_size), 1), len(sizes) - 1)
        few, many = sizes[upper - 1], sizes[upper]
        share = (micro_batch_size - few) / (many - few)
        blocks = (
            large if large.nbytes == small.nbytes else replace(large, nbytes=_grown(small.nbytes, large.nbytes, share))
            for small, large in zip(self.rehearsed[few].blocks, self.rehearsed[many].blocks, strict=True)
        )
        return replace(self.rehearsed[many], blocks=tuple(blocks))


def _grown(small: int, large: int, share: float) -> int:
    return max(round(small + share * (large - small)), 0)
