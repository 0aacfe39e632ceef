"""Receipts: measured memory and speed of a training, written by the trainer and benchmarks, read by plans."""

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
    """An out-of-memory error after `step` finished steps, in a phase of `rank`, and the sizes before and after it.

    Bytes: requested (None if unknown), free and total of the GPU, and torch's allocated and reserved ones. `saved`:
    whether all steps before it were saved.
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
    """The settings and measurements of a run's step.

    `batch` is the largest bucket's shape, of `buckets` of them. `device` is the driver's name of the GPU, or `cpu`.
    On an `emulated` one bytes are of torch's allocator, and times mean nothing. `expandable_segments`: its setting.
    `gpus_per_node`: processes of one machine. `steps` are of the run's last start, `skipped_steps` those of them
    that were skipped, `out_of_memory` those of all its starts. `seconds_per_step` is a median, start and first steps
    left out; `seconds` are of the whole start. Peaks are of one process, in bytes, by what `measured_with` names. On
    a CPU they are of the whole process. Reserved and predicted ones exist only on a GPU: for the benchmark, and for
    a run with a plan, which predicts them for its own size in pixels. `error_percent` is the benchmark's, of
    allocated bytes.
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
    """Write a real GPU's receipt to `folder()`; the name has date, model, device and digest. A failure is logged."""
    if receipt.device == "cpu" or receipt.emulated:
        return
    name = f"{receipt.written}-{receipt.model.name}-{receipt.device}-{receipt.digest()}"
    try:
        write_json(folder() / (re.sub(r"[^A-Za-z0-9.-]+", "-", name) + ".json"), receipt.model_dump(mode="json"))
    except UserError as error:
        log.notice(f"the receipt was not kept for plans: {error}")
