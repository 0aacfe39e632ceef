"""What a rehearsed step takes of one card: through the allocator, and with what the process takes beside it."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from bigdit.memory.allocator import Replay, replay
from bigdit.memory.process import ByteRange
from bigdit.memory.timeline import Timeline
from bigdit.spec import Strict

UNLIMITED = 1 << 50
"""More bytes than any card has: what the allocator would reserve if it never had to clean up."""


class Reserved(Strict):
    """The allocator in one of its two ways. `wanted_bytes` is the reserved peak without the card's limit; `on_card`
    is the replay within the card, which cleans its caches up before it fails."""

    wanted_bytes: NonNegativeInt
    on_card: Replay


class Footprint(Strict):
    """`usable_bytes` of the card, less the high end of `beside` (CUDA context and NCCL), are the allocator's."""

    usable_bytes: PositiveInt
    beside: ByteRange
    segments: Reserved
    expandable_segments: Reserved

    @property
    def fits(self) -> bool:
        """Whether one of the allocator's two ways comes through, with the most that the process may take beside it."""
        return self.segments.on_card.fits or self.expandable_segments.on_card.fits

    @property
    def process(self) -> ByteRange:
        """What nvidia-smi shows at the peak, by torch's default allocator; where it ran out, what it would show."""
        found = self.segments
        reserved = found.on_card.peak_reserved_bytes if found.on_card.fits else found.wanted_bytes
        return ByteRange(low_bytes=reserved, high_bytes=reserved) + self.beside


def footprint(timeline: Timeline, usable_bytes: int, beside: ByteRange) -> Footprint:
    """Replay `timeline` on a card of `usable_bytes`, of which the process takes so many `beside` torch's."""
    capacity = max(usable_bytes - beside.high_bytes, 1)

    def way(expandable_segments: bool) -> Reserved:
        free = replay(timeline, UNLIMITED, expandable_segments=expandable_segments, card_bytes=usable_bytes)
        fits_as_it_is = free.peak_reserved_bytes <= capacity
        on_card = (
            free.model_copy(update={"capacity_bytes": capacity})
            if fits_as_it_is
            else replay(timeline, capacity, expandable_segments=expandable_segments, card_bytes=usable_bytes)
        )
        return Reserved(wanted_bytes=free.peak_reserved_bytes, on_card=on_card)

    return Footprint(
        usable_bytes=usable_bytes,
        beside=beside,
        segments=way(expandable_segments=False),
        expandable_segments=way(expandable_segments=True),
    )
