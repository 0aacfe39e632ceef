"""What the allocator reserves beyond the peak, at any micro-batch size: a shallow sibling's step, replayed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bigdit.memory import Timeline
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import UNLIMITED


@dataclass(frozen=True)
class Gap:
    """Of one sibling at two micro-batch sizes, `few` and `many` samples: the bytes of each of its blocks grow evenly.

    How the allocator's pieces fit does not grow evenly, since it serves small, middling and large blocks from other
    segments: so it is replayed at powers of two, and between them taken along a line. A deeper model leaves more pieces
    than its sibling: 20 blocks of Sana 2.1 to 5.3 GiB where nothing is recomputed, 5 of them 0.7 to 4.0; 57 blocks of
    Flux under FSDP2 8.7 GiB, 10 of them 3.1.
    """

    sizes: tuple[int, int]
    few: Timeline
    many: Timeline
    known: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    def at(self, micro_batch_size: float) -> float:
        """Bytes that torch reserves beyond the allocated peak with expandable segments, on a card without a limit."""
        low = 1 << max(int(micro_batch_size).bit_length() - 1, 0)
        share = max(micro_batch_size / low - 1, 0.0)
        return (1 - share) * self._replayed(low) + (share * self._replayed(2 * low) if share else 0.0)

    def _replayed(self, micro_batch_size: int) -> float:
        if micro_batch_size not in self.known:
            timeline = self._timeline(micro_batch_size)
            reserved = replay(timeline, UNLIMITED, expandable_segments=True).peak_reserved_bytes
            self.known[micro_batch_size] = reserved - timeline.peak_allocated_bytes
        return self.known[micro_batch_size]

    def _timeline(self, micro_batch_size: int) -> Timeline:
        """The sibling's; that of `many` as it stands where the two do not allocate and free alike."""
        if self.few.events != self.many.events:
            return self.many
        share = (micro_batch_size - self.sizes[0]) / (self.sizes[1] - self.sizes[0])
        blocks = (
            large if large.nbytes == small.nbytes else replace(large, nbytes=_grown(small.nbytes, large.nbytes, share))
            for small, large in zip(self.few.blocks, self.many.blocks, strict=True)
        )
        return replace(self.many, blocks=tuple(blocks))


def _grown(small: int, large: int, share: float) -> int:
    return max(round(small + share * (large - small)), 0)
