"""Where the bytes are at the peak: a timeline summed up by phase and by category."""

from __future__ import annotations

from collections import Counter

from pydantic import NonNegativeInt, PositiveInt

from bigdit.memory.timeline import CATEGORIES, Category, Timeline
from bigdit.spec import Strict

CUDA_GRANULARITY = 512
"""The CUDA caching allocator counts every block in multiples of this many bytes.

Source: kMinBlockSize in pytorch/c10/core/AllocatorConfig.h.
"""


class PhasePeak(Strict):
    """The highest point of one phase over all its occurrences, and what was allocated there.

    `at_peak` sums to `peak_bytes`; `end_bytes` is what the phase left behind, at its highest.
    """

    phase: str
    peak_bytes: NonNegativeInt
    end_bytes: NonNegativeInt
    at_peak: dict[Category, NonNegativeInt]


class Ledger(Strict):
    """Peak allocated bytes, each block counted in multiples of `granularity`, and which phase decides it."""

    granularity: PositiveInt
    phases: tuple[PhasePeak, ...]

    @property
    def deciding(self) -> PhasePeak:
        """The phase with the highest peak; the first of them where several are equal."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def peak_allocated_bytes(self) -> int:
        return self.deciding.peak_bytes

    @property
    def at_peak(self) -> dict[Category, int]:
        """What is allocated at the peak, by category; sums to `peak_allocated_bytes`."""
        return self.deciding.at_peak

    def phase(self, name: str) -> PhasePeak:
        """The peak of the phase `name`. Raises KeyError where there is no such phase."""
        for phase in self.phases:
            if phase.phase == name:
                return phase
        raise KeyError(name)


def ledger(timeline: Timeline, granularity: int = CUDA_GRANULARITY) -> Ledger:
    """Sum up `timeline`; `granularity` is 512 for CUDA's caching allocator, and 1 for the bytes asked for."""
    found: dict[str, PhasePeak] = {}
    live: Counter[Category] = Counter()
    for span in timeline.spans:
        now = peak = live.total()
        at_peak = live.copy()
        for block, change in timeline.changes(span, granularity):
            live[block.category] += change
            now += change
            if now > peak:
                peak, at_peak = now, live.copy()
        old = found.get(span.phase)
        end = max(now, old.end_bytes) if old else now
        if old is None or peak > old.peak_bytes:
            found[span.phase] = PhasePeak(phase=span.phase, peak_bytes=peak, end_bytes=end, at_peak=_parts(at_peak))
        else:
            found[span.phase] = old.model_copy(update={"end_bytes": end})
    return Ledger(granularity=granularity, phases=tuple(found.values()))


def _parts(live: Counter[Category]) -> dict[Category, int]:
    return {category: live[category] for category in CATEGORIES if live[category]}
