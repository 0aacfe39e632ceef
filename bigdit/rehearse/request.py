"""What a rehearsal is asked, and what it answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from bigdit.catalog.encoders import OnlineEncoders
from bigdit.catalog.families import family_objective
from bigdit.memory import Ledger, Timeline
from bigdit.objective_spec import ObjectiveSpec
from bigdit.spec import BatchShape, ModelSpec, Strategy, Strict

Kernels = Literal["cuda", "cpu"]
Part = Literal["steps", "encoders"]
PICTURES, TEXTS = "pictures", "texts"
"""The phases of encoders alone."""

A100_MULTIPROCESSORS = 108
"""Of the card that a request is about where it names none. Source: NVIDIA A100 Tensor Core GPU Architecture."""


def _own(given: dict[str, Any]) -> ObjectiveSpec:
    return family_objective(given["model"])


class RehearsalRequest(Strict):
    """One strategy at several micro-batch sizes; its own `micro_batch_size` gives way to each of them.

    Without any size it is asked whether the model can be made. `part`: two steps, or a micro-batch through the encoders
    alone. `objective`: left out, the model's own. `encoders`: what encodes on the device, with features online.
    `kernels`: whose kernels allocate, those of a CUDA card of `compute_capability` with so many `multiprocessors`, or
    those of a CPU. `device_bytes`: what engines that ask are told the card has; None: more than they want.
    """

    model: ModelSpec
    batch: BatchShape
    strategy: Strategy
    micro_batch_sizes: tuple[PositiveInt, ...]
    objective: ObjectiveSpec = Field(default_factory=_own)
    encoders: OnlineEncoders | None = None
    kernels: Kernels = "cuda"
    compute_capability: tuple[int, int] = (8, 0)
    multiprocessors: PositiveInt = A100_MULTIPROCESSORS
    device_bytes: PositiveInt | None = None
    part: Part = "steps"


class RehearsedSize(Strict):
    """The rehearsal of one micro-batch size, over two optimizer steps.

    `ledger` counts in 512 B for CUDA and in single bytes for the CPU; `packed_timeline` is the device's whole
    record, and `packed_host_timeline` that of the host beside a CUDA card; `checkpoint_bytes` is what a process copies
    to the host to save its state; `params` counts elements; `notices` are to be said beside the numbers; `seconds` is
    what this size took, without the start of the worker.
    """

    micro_batch_size: PositiveInt
    params: PositiveInt
    ledger: Ledger
    packed_timeline: str
    packed_host_timeline: str | None
    checkpoint_bytes: NonNegativeInt
    versions: dict[str, str]
    notices: tuple[str, ...]
    seconds: NonNegativeFloat

    @property
    def timeline(self) -> Timeline:
        return Timeline.unpack(self.packed_timeline)

    @property
    def host_timeline(self) -> Timeline:
        """What the host holds beside the device; the device's own timeline where that is the CPU."""
        return Timeline.unpack(self.packed_host_timeline or self.packed_timeline)


class Rehearsal(Strict):
    """The answers, in the order of the request's `micro_batch_sizes`."""

    sizes: tuple[RehearsedSize, ...]

    def size(self, micro_batch_size: int) -> RehearsedSize:
        """The rehearsal of this micro-batch size. Raises KeyError where it was not asked for."""
        for size in self.sizes:
            if size.micro_batch_size == micro_batch_size:
                return size
        raise KeyError(micro_batch_size)
