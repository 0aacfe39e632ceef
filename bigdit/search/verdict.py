"""Whether a rehearsed step fits a card, with an honest band."""

from __future__ import annotations

from bigdit.catalog import Gpu
from bigdit.memory import Timeline
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import Footprint, footprint
from bigdit.memory.process import ByteRange
from bigdit.search.plan import Band, Verdict


def safe_bytes(gpu: Gpu, beside: ByteRange, band: Band) -> int:
    """What torch may reserve on the card so that a prediction FITS: the band's share more would still fit."""
    return max(int((gpu.usable_bytes - beside.high_bytes) / (1 + band.share)), 1)


def verdict(timeline: Timeline, gpu: Gpu, world_size: int, band: Band) -> tuple[Verdict, Footprint]:
    """FITS: torch's default allocator never wants more than is safe, and never has to empty its caches.

    TIGHT: it fits within the band only, or with emptied caches, expandable segments or the least that the process
    may take beside torch. Raises UserError for a card of unknown compute capability.
    """
    found = footprint(timeline, gpu.usable_bytes, gpu.compute_capability, world_size, gpu.multiprocessors)
    if found.segments.wanted_bytes <= safe_bytes(gpu, found.beside, band):
        return "FITS", found
    most = gpu.usable_bytes - found.beside.low_bytes
    if found.fits or (most > 0 and replay(timeline, most, expandable_segments=True).fits):
        return "TIGHT", found
    return "DOES NOT FIT", found


def expected(reserved_bytes: float, gpu: Gpu, beside: ByteRange, band: Band) -> Verdict:
    """The verdict on a prediction of what the default allocator reserves."""
    if reserved_bytes <= safe_bytes(gpu, beside, band):
        return "FITS"
    return "TIGHT" if reserved_bytes <= gpu.usable_bytes - beside.low_bytes else "DOES NOT FIT"
