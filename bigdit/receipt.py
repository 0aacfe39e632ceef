"""Receipts: the measured memory and speed of a run, written by the trainer and benchmarks, read by plans."""

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
    """A step, after `step` finished ones, in which `rank` ran out of GPU memory; and the step sizes before and after.

    Bytes: of the failed allocation (None if unknown), free and total of the GPU, allocated and reserved by torch.
    `saved`: whether all steps before it were saved.
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
    """The settings of a run's steps, and their measured memory and speed.

    `batch`: the shape of the largest of `buckets` buckets. `device`: the GPU's name by its driver, or `cpu`. Times of
    an `emulated` GPU are meaningless. `expandable_segments`: the allocator's setting. `gpus_per_node`: processes on a
    machine.

    `steps` and `skipped_steps`: since the run's last start; `out_of_memory`: of all starts. `seconds`: since the last
    start; `seconds_per_step`: a median without the first steps.

    Peaks are bytes of one process, measured with `measured_with`; on a CPU the memory of the process. Reserved and
    predicted peaks exist on GPUs only, predicted ones for the plan's resolution. `error_percent`: of the benchmark's
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
    """The folder of receipts: BIGDIT_RECEIPTS, or bigdit's folder in the user's data (XDG base directories)."""
    chosen = os.environ.get("BIGDIT_RECEIPTS")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "bigdit" / "receipts"


def write(receipt: Receipt, path: Path) -> None:
    """Write a receipt to `path`, and keep it for plans. Raises UserError if `path` cannot be written."""
    write_json(path, receipt.model_dump(mode="json"))
    keep(receipt)


def keep(receipt: Receipt) -> None:
    """Write a GPU's receipt into `folder()`, named by date, model, device and digest. A failure is logged.

    Receipts of CPUs are useless for plans, and an emulated GPU's would pass for a measurement.
    """
    if receipt.device == "cpu" or receipt.emulated:
        return
    name = f"{receipt.written}-{receipt.model.name}-{receipt.device}-{receipt.digest()}"
    try:
        write_json(folder() / (re.sub(r"[^A-Za-z0-9.-]+", "-", name) + ".json"), receipt.model_dump(mode="json"))
    except UserError as error:
        log.notice(f"the receipt was not kept for plans: {error}")
