"""Whether a rehearsed step fits a card and its host: one verdict, for one setting of torch's allocator.

Plans are for expandable segments, which training by a plan sets: they keep no pieces that no block fits into, and with
torch's default those come to gigabytes.
"""

from __future__ import annotations

import math

from bigdit.catalog import Gpu
from bigdit.memory import Timeline
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import Footprint, Reserved, footprint
from bigdit.memory.process import ByteRange
from bigdit.search.plan import Band, Verdict


def planned(found: Footprint) -> Reserved:
    """The allocator in the way that plans are for."""
    return found.expandable_segments


def process(reserved_bytes: int, beside: ByteRange, band: Band) -> ByteRange:
    """What the process takes of the card: what torch reserves, the band's share of it more at most, and what is beside
    torch."""
    more = math.ceil(reserved_bytes * band.share)
    return ByteRange(low_bytes=reserved_bytes, high_bytes=reserved_bytes + more) + beside


def safe_bytes(gpu: Gpu, beside: ByteRange, band: Band) -> int:
    """The most that torch may reserve on the card for a step to FIT."""
    return max(int((gpu.usable_bytes - beside.high_bytes) / (1 + band.share)), 1)


def expected(taken: ByteRange, usable_bytes: int) -> Verdict:
    """FITS: the most that a process takes is on the card. TIGHT: the least is."""
    if taken.high_bytes <= usable_bytes:
        return "FITS"
    return "TIGHT" if taken.low_bytes <= usable_bytes else "DOES NOT FIT"


def verdict(timeline: Timeline, gpu: Gpu, beside: ByteRange, band: Band) -> tuple[Verdict, Footprint]:
    """As `expected` has it, and TIGHT too where torch comes through by emptying its caches, beside the least that the
    process may take."""
    found = footprint(timeline, gpu.usable_bytes, beside)
    said = expected(process(planned(found).wanted_bytes, found.beside, band), gpu.usable_bytes)
    most = gpu.usable_bytes - found.beside.low_bytes
    if said != "DOES NOT FIT" or most <= 0:
        return said, found
    within = replay(timeline, most, expandable_segments=True, card_bytes=gpu.usable_bytes)
    return "TIGHT" if within.fits else said, found
