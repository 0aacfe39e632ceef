"""What of a GPU's bytes torch may reserve: less what is not torch's, and a margin for what an emulated GPU cannot know.

Plans are for expandable segments, which training by a plan sets: they keep no pieces that no block fits into, and with
torch's default those come to gigabytes.
"""

from __future__ import annotations

import math

from bigdit.catalog import Gpu
from bigdit.memory.process import ByteRange
from bigdit.search.plan import Band, Verdict


def process(reserved_bytes: int, non_torch: ByteRange, band: Band) -> ByteRange:
    """What the process takes of the GPU: what torch reserves, the band's share of it more at most, and the rest."""
    more = math.ceil(reserved_bytes * band.share)
    return ByteRange(low_bytes=reserved_bytes, high_bytes=reserved_bytes + more) + non_torch


def safe_bytes(gpu: Gpu, non_torch: ByteRange, band: Band) -> int:
    """The most that torch may reserve on the GPU for a step to FIT."""
    return max(int((gpu.usable_bytes - non_torch.high_bytes) / (1 + band.share)), 1)


def verdict_of(taken: ByteRange, usable_bytes: int) -> Verdict:
    """FITS: the most that a process takes is on the GPU. TIGHT: the least is."""
    if taken.high_bytes <= usable_bytes:
        return "FITS"
    return "TIGHT" if taken.low_bytes <= usable_bytes else "DOES NOT FIT"
