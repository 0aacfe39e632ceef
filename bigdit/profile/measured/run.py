"""What the caching allocator of a CUDA device did over two training steps. Nothing here imports torch."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from bigdit.errors import UserError
from bigdit.memory import Timeline
from bigdit.spec import Strict

RAN_OUT = "two steps ran out of the card's memory"
"""How a worker begins to say so."""


class RanOut(UserError):
    """Two steps took more than the card has."""


def told(error: Exception) -> Exception:
    """The error that a worker ended with, as RanOut where it says that."""
    ran_out = isinstance(error, UserError) and error.problems[0].startswith(RAN_OUT)
    return RanOut(*error.problems) if isinstance(error, UserError) and ran_out else error


class CardPhase(Strict):
    """One occurrence of a phase by torch's own counters; `allocated` counts whole blocks of the allocator."""

    phase: str
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt


class Segment(Strict):
    """The allocator took a segment from the device, or gave it back (negative), before event `at` of the timeline."""

    at: NonNegativeInt
    nbytes: int


class Spent(Strict):
    """How often an operator was called, or a kernel run, in one step, and what its kernels took."""

    count: PositiveInt
    seconds: NonNegativeFloat


class Timing(Strict):
    """Steps after the first two on a real card, one right after another.

    `seconds_per_step` is their mean; after `host_seconds_per_step` of it the host had handed all over. `operators` and
    `kernels` are of one more step, under torch's profiler.
    """

    steps: PositiveInt
    seconds_per_step: NonNegativeFloat
    host_seconds_per_step: NonNegativeFloat
    operators: dict[str, Spent]
    kernels: dict[str, Spent]


class CardRun(Strict):
    """Two steps on a CUDA device.

    `packed_timeline` has every block as torch asked for it, labelled with its operator; a block is freed when torch
    frees it. `deferred`: frees that waited for another stream. `beside_bytes`: taken on
    the device by the process beside the allocator, the context among it; None where that is not known. `timing`: of a
    real card, where it was asked for.
    """

    device: str
    params: PositiveInt
    phases: tuple[CardPhase, ...]
    packed_timeline: str
    segments: tuple[Segment, ...]
    deferred: NonNegativeInt
    alloc_retries: NonNegativeInt
    beside_bytes: NonNegativeInt | None
    timing: Timing | None = None
    host_peak_bytes: PositiveInt
    versions: dict[str, str]
    seconds: NonNegativeFloat

    @property
    def timeline(self) -> Timeline:
        return Timeline.unpack(self.packed_timeline)
