"""Jobs for an emulated GPU, and their results. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from bigdit.catalog import CatalogModel, Gpu, batch_shape
from bigdit.catalog.conditions import with_controlnet
from bigdit.catalog.context import context_misfits, context_problems
from bigdit.catalog.encoders import OnlineEncoders, online_encoders
from bigdit.catalog.families import family_objective
from bigdit.catalog.gpus import float8_problems, precision_problems
from bigdit.errors import UserError
from bigdit.memory import HostMemory, Ledger, Timeline
from bigdit.objective_spec import ObjectiveSpec
from bigdit.strategy import BatchShape, ModelSpec, Strategy, Strict, untrained_text

UNLIMITED = 1 << 50
"""Bytes of a GPU on which every step runs to its end."""

UPDATE = ("step", "ema")
"""The phases that end a step."""

Counted = Literal["nothing", "update", "step"]


class AttemptJob(Strict):
    """An attempt, or a recorded run, for which torch may reserve `capacity_bytes`.

    Without `to_end` the GPU gives nothing more once the allocator is short of room: the steps do not fit then. Without
    `values` no small tensor is computed, and the host reads zeros. `counted`: the second step counts what operators and
    collectives do, in all of it or in UPDATE alone. `snapshot`: the file that gets torch's memory snapshot of a
    recorded run.
    """

    what: Literal["attempt", "recorded"] = "attempt"
    request: StepRequest
    capacity_bytes: PositiveInt = UNLIMITED
    to_end: bool = True
    values: bool = True
    counted: Counted = "nothing"
    snapshot: str | None = None


class PhaseBytes(Strict):
    """Allocated bytes of a phase: its peak and its end, each the highest of all occurrences."""

    peak_bytes: NonNegativeInt
    end_bytes: NonNegativeInt


class Attempt(Strict):
    """Two steps, or what ran until memory ran out, by torch's own counters.

    `out_of_memory`: torch's message. `retries`: how often the allocator freed cached memory to find room. `reads`:
    copies from the GPU to CPU memory in the forward passes; 1 if it ran with values. `launched`: by the second step.
    `packed_work` is a Timeline without blocks; None if it was not counted. `block_bytes`: of the weights of each of the
    model's blocks.
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
    block_bytes: tuple[NonNegativeInt, ...] = ()
    seconds: NonNegativeFloat

    @property
    def ran(self) -> bool:
        return self.out_of_memory is None

    @property
    def fits(self) -> bool:
        """Whether it ran, and the allocator never had to free cached memory."""
        return self.ran and not self.retries

    @property
    def peaks(self) -> dict[str, int]:
        """Peak allocated bytes of each phase."""
        return {phase: each.peak_bytes for phase, each in self.phases.items()}

    @property
    def work(self) -> Timeline:
        """Operators and collectives of one step, by span. Raises ValueError if they were not counted."""
        if self.packed_work is None:
            raise ValueError("the work of this attempt was not counted")
        return Timeline.unpack(self.packed_work)


class Profile(Strict):
    """Two steps under the recorder, on a GPU without a limit. `ledger` counts in multiples of 512 B.

    `checkpoint_bytes`: the state that a process copies to CPU memory to save it. `params` counts elements.
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
    """An attempt ran out of time. It is not cached, since a faster or less busy machine may finish it."""


class Launched(Strict):
    """What the CPU launched on the GPU in one phase of a step, and how often it waited.

    `counts` has the names of emulator/inside/libraries.py. `library_calls` are products, convolutions and attention of
    cuBLAS and cuDNN. Each launches at least one kernel.
    """

    counts: dict[str, PositiveInt]

    def __add__(self, other: Launched) -> Launched:
        return Launched(counts=dict(Counter(self.counts) + Counter(other.counts)))

    @property
    def launches(self) -> int:
        """The number of all launches, copies and collectives."""
        return sum(count for name, count in self.counts.items() if not name.startswith(("bytes_", "host_syncs")))


def launched(before: Mapping[str, int], after: Mapping[str, int]) -> Launched:
    """The difference of two readings of the counters, without zeros."""
    return Launched(counts=dict(Counter(after) - Counter(before)))


IMAGES, TEXTS = "images", "texts"
"""The phases of encoders alone."""


def weights_of(phase: str) -> str:
    """The phase in which the weights of these encoders move to the GPU."""
    return f"weights of {phase}"


class StepRequest(Strict):
    """The training steps of one strategy, or a micro-batch through its encoders alone (`part`).

    `objective` defaults to the model's own. `encoders` run in the step, with features online.
    """

    model: ModelSpec
    batch: BatchShape
    strategy: Strategy
    objective: ObjectiveSpec = Field(default_factory=lambda given: family_objective(given["model"]))
    encoders: OnlineEncoders | None = None
    part: Literal["steps", "encoders"] = "steps"


def request_for(
    model: CatalogModel,
    gpu: Gpu,
    strategy: Strategy,
    *,
    resolution: int | tuple[int, int] | None = None,
    frames: int | None = None,
) -> StepRequest:
    """One strategy of `model` on `gpu`, at `resolution` (a side, or height and width) and `frames` of a video.

    Both default to the model's own. Raises UserError for pixels that do not fit the model and tokens that cannot
    be split; also for a precision, or FP8, that the GPU does not compute.
    """
    problems = [f"strategy.precision: {problem}" for problem in precision_problems(gpu, strategy.precision)]
    problems += [
        f"strategy.float8 is {strategy.float8}, and {problem}" for problem in float8_problems(gpu, strategy.float8)
    ]
    if problems:
        raise UserError(*problems)
    model = model if strategy.controlnet is None else with_controlnet(model, strategy.controlnet)
    batch = batch_shape(model, resolution, frames)
    text = None if batch.text is None else batch.text[0]
    problems += context_problems(model.spec, strategy.cp, strategy.cp_ring)
    problems += context_misfits(model.spec, strategy.cp, batch.grids, text)
    if problems:
        raise UserError(*problems)
    encoders = online_encoders(model, batch, strategy.text_dtype) if strategy.features == "online" else None
    return StepRequest(model=model.spec, batch=batch, strategy=strategy, encoders=encoders)


def check(request: StepRequest) -> None:
    """Raise UserError for a request that cannot run."""
    online = request.strategy.features == "online"
    if online and request.encoders is None:
        raise UserError(
            f"strategy.features is online, and the request for {request.model.name} has no encoders; "
            "catalog.encoders.online_encoders has those of the catalogue's models"
        )
    if request.strategy.trains_text and (why := untrained_text(request.model.class_name)) is not None:
        raise UserError(why)
