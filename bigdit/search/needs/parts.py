"""How many samples a part of a feature store has."""

from __future__ import annotations

import math

PART_SIZE = 256
"""Samples in a part of a run that does not say, as config/data.py has it."""
LARGE_PART = 1e9
"""Bytes of a part, of which there are few in a data set and several in memory."""


def part_size(sample_bytes: float) -> int:
    """How many samples of so many bytes make a part of a store: as many as a run says by itself, or as fit 1 GB."""
    return min(PART_SIZE, 1 << int(math.log2(max(LARGE_PART / sample_bytes, 1))))
