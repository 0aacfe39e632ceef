"""What an emulated GPU is asked, and what it answers. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from bigdit.errors import UserError
from bigdit.memory import HostMemory, Ledger, Timeline
from bigdit.profile.request import StepRequest
from bigdit.spec import Strict

UNLIMITED = 1 << 50
"""Bytes of a GPU on which every step runs to its end."""


class Question(Strict):
    """An attempt, or a recorded run, for which torch may reserve `capacity_bytes`.

    Without `to_end` the GPU gives nothing more once the allocator is short of room: the steps do not fit then. Without
    `values` no small tensor is computed, and the host reads zeros. `counted`: one more step counts what its operators
    and collectives do. `snapshot`: the file that gets torch's memory snapshot of a recorded run.
    """

    what: Literal["attempt", "recorded"] = "attempt"
    request: StepRequest
    capacity_bytes: PositiveInt = UNLIMITED
    to_end: bool = True
    values: bool = True
    counted: bool = False
    snapshot: str | None = None


class PhaseBytes(Strict):
    """Bytes that torch had allocated in a phase: the most, and at its end; the highest of all its occurrences."""

    peak_bytes: NonNegativeInt
    end_bytes: NonNegativeInt


class Attempt(Strict):
    """Two steps, or what was taken until one ran out of memory: by torch's own counters.

    `out_of_memory`: torch's message. `retries`: how often the allocator gave back what it kept, to find room. `reads`:
    copies from the GPU to the host, before the optimizer steps. `launched`: by the second step. `packed_work` (a
    Timeline without blocks) and `checkpoint_bytes` are there where they were counted.
    """

    out_of_memory: str | None
    retries: NonNegativeInt
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    phases: dict[str, PhaseBytes]
    params: NonNegativeInt
    host: HostMemory
    checkpoint_bytes: NonNegativeInt
    reads: NonNegativeInt
    launched: dict[str, Launched]
    packed_work: str | None
    seconds: NonNegativeFloat

    @property
    def ran(self) -> bool:
        return self.out_of_memory is None

    @property
    def fits(self) -> bool:
        """Whether it ran, and never had to look for room."""
        return self.ran and not self.retries

    @property
    def memory(self) -> tuple[int, int, int, dict[str, int]]:
        """What two attempts that take the same memory have alike."""
        return self.retries, self.peak_allocated_bytes, self.peak_reserved_bytes, self.peaks

    @property
    def peaks(self) -> dict[str, int]:
        """The most allocated bytes of each phase."""
        return {phase: each.peak_bytes for phase, each in self.phases.items()}

    @property
    def work(self) -> Timeline:
        """Operators and collectives of one step, by span. Raises ValueError where they were not counted."""
        if self.packed_work is None:
            raise ValueError("the work of this attempt was not counted")
        return Timeline.unpack(self.packed_work)


class Profile(Strict):
    """Two steps under the recorder, on a GPU without a limit. `ledger` counts in 512 B.

    `checkpoint_bytes`: what a process copies to the host to save its state. `params` counts elements.
    """

    params: PositiveInt
    ledger: Ledger
    peak_reserved_bytes: NonNegativeInt
    packed_timeline: str
    packed_host_timeline: str
    checkpoint_bytes: NonNegativeInt
    versions: dict[str, str]
    notices: tuple[str, ...]
    seconds: NonNegativeFloat

    @property
    def timeline(self) -> Timeline:
        return Timeline.unpack(self.packed_timeline)

    @property
    def host_timeline(self) -> Timeline:
        return Timeline.unpack(self.packed_host_timeline)


class TookTooLong(UserError):
    """An answer did not come in time: on another day, or another machine, it may."""


class Launched(Strict):
    """What the host handed to the GPU in one phase of a step, and how often it waited.

    `counts` has the names of emulator/inside/counts.py. `library_calls` are products, convolutions and attention of
    cuBLAS and cuDNN. Each launches one kernel at least.
    """

    counts: dict[str, PositiveInt]

    def __add__(self, other: Launched) -> Launched:
        return Launched(counts=dict(Counter(self.counts) + Counter(other.counts)))

    @property
    def launches(self) -> int:
        """All that the host handed over, one thing after another."""
        apart = ("bytes_", "host_syncs")
        return sum(count for name, count in self.counts.items() if not name.startswith(apart))


def launched(before: Mapping[str, int], after: Mapping[str, int]) -> Launched:
    """What the libraries counted between two readings, without the zeros."""
    return Launched(counts=dict(Counter(after) - Counter(before)))
