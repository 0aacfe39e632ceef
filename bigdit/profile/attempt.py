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
    """`what`: an attempt, or a recorded run.

    Torch may reserve `capacity_bytes`. Without `to_end` the GPU gives nothing more once the allocator is short of room:
    the steps do not fit then. Without `values` no small tensor is computed, and the host reads zeros. `counted`: one
    more step counts what its operators and collectives do. `snapshot`: the file that gets torch's memory snapshot of a
    recorded run.
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
    """Two steps, or what was taken until one ran out of memory: by torch's own counters, with expandable segments.

    `out_of_memory`: torch's message. `retries`: how often the allocator gave back what it kept, to find room. `reads`:
    copies from the GPU to the host, before the optimizer steps. `host`: bytes of host tensors. `launched`: what the
    second step had the GPU do, by phase. `packed_work` (a Timeline without blocks) and `checkpoint_bytes` are there
    where they were counted.
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
    def memory(self) -> tuple[int, int, int]:
        """What two attempts that take the same memory have alike."""
        return self.retries, self.peak_allocated_bytes, self.peak_reserved_bytes

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
    """Two steps under the recorder, on a GPU without a limit.

    `ledger` counts in 512 B. `packed_timeline` is the record of the GPU, `packed_host_timeline` that of the host.
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


Way = Literal["to device", "to host", "on device", "between"]
"""Where a copy goes: from the host, to it, on one card, from card to card."""

_WAYS: dict[Way, str] = {"to device": "to_device", "to host": "to_host", "on device": "on_device", "between": "between"}
_COLLECTIVES = {
    "all_reduces": "all_reduce",
    "all_gathers": "all_gather",
    "reduce_scatters": "reduce_scatter",
    "broadcasts": "broadcast",
    "reduces": "reduce",
    "sends": "send",
    "receives": "receive",
}


class Copies(Strict):
    """So many copies of so many bytes together."""

    count: NonNegativeInt
    nbytes: NonNegativeInt

    def __add__(self, other: Copies) -> Copies:
        return Copies(count=self.count + other.count, nbytes=self.nbytes + other.nbytes)


class Launched(Strict):
    """What the host handed to the card in one phase of a step, and how often it waited.

    `kernels` were launched by name; `library_calls` are products, convolutions and attention of cuBLAS and cuDNN, whose
    kernels only these know, one at least each; `fills` are memsets; `collectives` NCCL's by kind.
    """

    kernels: NonNegativeInt
    library_calls: NonNegativeInt
    fills: NonNegativeInt
    copies: dict[Way, Copies]
    collectives: dict[str, NonNegativeInt]
    host_syncs: NonNegativeInt

    def __add__(self, other: Launched) -> Launched:
        return Launched(
            kernels=self.kernels + other.kernels,
            library_calls=self.library_calls + other.library_calls,
            fills=self.fills + other.fills,
            copies={way: self._copies(way) + other._copies(way) for way in {**self.copies, **other.copies}},
            collectives=dict(Counter(self.collectives) + Counter(other.collectives)),
            host_syncs=self.host_syncs + other.host_syncs,
        )

    def _copies(self, way: Way) -> Copies:
        return self.copies.get(way, Copies(count=0, nbytes=0))

    @property
    def launches(self) -> int:
        """All that the host handed over, one thing after another."""
        copies = sum(each.count for each in self.copies.values())
        return self.kernels + self.library_calls + self.fills + copies + sum(self.collectives.values())


def launched(before: Mapping[str, int], after: Mapping[str, int]) -> Launched:
    """Between two readings of the libraries' counters, by the names of emulator/inside/counts.py."""
    new = {name: after[name] - before[name] for name in after}
    copies = {
        way: Copies(count=count, nbytes=new[f"bytes_{name}"])
        for way, name in _WAYS.items()
        if (count := new[f"copies_{name}"])
    }
    return Launched(
        kernels=new["launches"],
        library_calls=new["library_calls"],
        fills=new["fills"],
        copies=copies,
        collectives={kind: count for name, kind in _COLLECTIVES.items() if (count := new[name])},
        host_syncs=new["host_syncs"],
    )
