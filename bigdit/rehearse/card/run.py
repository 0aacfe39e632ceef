"""What the caching allocator of a CUDA device did over two training steps. Nothing here imports torch."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from bigdit.memory import Timeline
from bigdit.spec import Strict


class CardPhase(Strict):
    """One occurrence of a phase by torch's own counters; `allocated` counts whole blocks of the allocator."""

    phase: str
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt


class Segment(Strict):
    """The allocator took a segment from the device, or gave it back (negative), before event `at` of the timeline."""

    at: NonNegativeInt
    nbytes: int


class CardRun(Strict):
    """Two steps on a CUDA device.

    `packed_timeline` has every block as torch asked for it, labelled with its operator; a block is freed when torch
    frees it. `deferred`: frees that waited for another stream. `beside_bytes`: taken on
    the device by the process beside the allocator, the context among it; None where that is not known.
    """

    device: str
    params: PositiveInt
    phases: tuple[CardPhase, ...]
    packed_timeline: str
    segments: tuple[Segment, ...]
    deferred: NonNegativeInt
    alloc_retries: NonNegativeInt
    beside_bytes: NonNegativeInt | None
    host_peak_bytes: PositiveInt
    versions: dict[str, str]
    seconds: NonNegativeFloat

    @property
    def timeline(self) -> Timeline:
        return Timeline.unpack(self.packed_timeline)
