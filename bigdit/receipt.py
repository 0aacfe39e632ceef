"""What a training took: written by the trainer and the benchmark, read by plans."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from bigdit import log
from bigdit.errors import UserError, versions
from bigdit.files import write_json
from bigdit.objective_spec import ObjectiveSpec
from bigdit.strategy import BatchShape, ModelSpec, StepSize, Strategy, Strict


class OutOfMemory(Strict):
    """A step, after `step` finished ones, that ran out of GPU memory in a phase of `rank`; and the sizes before and
    after.

    Bytes: what was asked for (None where unknown), what the GPU had left of its total, and what torch had allocated and
    reserved of it. `saved`: whether all steps before it were saved first.
    """

    step: NonNegativeInt
    rank: NonNegativeInt
    device: str
    phase: str
    asked_bytes: NonNegativeInt | None
    free_bytes: NonNegativeInt
    total_bytes: PositiveInt
    allocated_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt
    saved: bool
    before: StepSize
    after: StepSize


class Receipt(Strict):
    """One run's step: its settings, and what was measured.

    `batch`: the shape of the largest of `buckets` buckets. `device`: the GPU as its driver names it, or `cpu`. An
    `emulated` one has bytes of torch's own allocator, and meaningless times. `expandable_segments`: how the allocator
    was set. `gpus_per_node`: processes on a machine.

    `steps` and `skipped_steps` are of the run's last start, `out_of_memory` of all its starts. `seconds` are of the
    whole start; `seconds_per_step` is a median without the start and the first steps.

    Peaks are bytes of one process, by what `measured_with` names; on a CPU all that the process took. Reserved and
    predicted peaks are known on a GPU alone. A plan predicts them, for its own size in pixels. `error_percent`: the
    benchmark's, of allocated bytes.
    """

    kind: Literal["train", "bench"]
    written: datetime.date = Field(default_factory=datetime.date.today)
    model: ModelSpec
    batch: BatchShape
    buckets: PositiveInt
    strategy: Strategy
    objective: ObjectiveSpec
    device: str
    emulated: bool = False
    expandable_segments: bool = False
    compute_capability: tuple[int, int] | None
    gpus_per_node: PositiveInt
    steps: PositiveInt
    skipped_steps: NonNegativeInt = 0
    out_of_memory: tuple[OutOfMemory, ...] = ()
    seconds: NonNegativeFloat
    seconds_per_step: PositiveFloat | None
    samples_per_second: PositiveFloat
    predicted_peak_allocated_bytes: PositiveInt | None = None
    predicted_peak_reserved_bytes: PositiveInt | None = None
    measured_peak_allocated_bytes: PositiveInt | None
    measured_peak_reserved_bytes: PositiveInt | None
    measured_with: str
    error_percent: float | None = None
    versions: dict[str, str] = Field(default_factory=versions)


def folder() -> Path:
    """The folder of receipts: BIGDIT_RECEIPTS, or bigdit's in the user's data (XDG base directories)."""
    chosen = os.environ.get("BIGDIT_RECEIPTS")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "bigdit" / "receipts"


def write(receipt: Receipt, path: Path) -> None:
    """Write a receipt to `path`, and keep it for plans. Raises UserError where `path` cannot be written."""
    write_json(path, receipt.model_dump(mode="json"))
    keep(receipt)


def keep(receipt: Receipt) -> None:
    """Put a GPU's receipt into `folder()`, named by date, model, device and digest. A failure to write is logged.

    Plans have no use for a CPU's, and an emulated GPU's would pass for a measurement.
    """
    if receipt.device == "cpu" or receipt.emulated:
        return
    name = f"{receipt.written}-{receipt.model.name}-{receipt.device}-{receipt.digest()}"
    try:
        write_json(folder() / (re.sub(r"[^A-Za-z0-9.-]+", "-", name) + ".json"), receipt.model_dump(mode="json"))
    except UserError as error:
        log.notice(f"the receipt was not kept for plans: {error}")
