"""Files of a run that others read: metrics, and `run.json` with its settings and the memory of its first steps.
Nothing here imports torch."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from bigdit.config.plan_file import PlanFile, unplanned
from bigdit.config.run import RECORD, RunConfig
from bigdit.documents import parse_json
from bigdit.errors import versions
from bigdit.files import write_json
from bigdit.receipt import OutOfMemory
from bigdit.strategy import ModelSpec, Strategy, Strict
from bigdit.units import gib


class PhaseMemory(Strict):
    """The peak bytes of one phase on a GPU, over all its occurrences: allocated, and reserved by torch."""

    phase: str
    allocated_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt | None = None


class MeasuredMemory(Strict):
    """The memory of one process in its first `steps` steps, measured by `method`.

    On a GPU: torch's count since the engine's start, by phase. A phase lasts until the next one begins. On a CPU: the
    memory of the whole process, without phases.
    """

    method: str
    steps: NonNegativeInt
    phases: tuple[PhaseMemory, ...]
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt | None


class RunRecord(Strict):
    """A run since its last start at step `start`: its settings, planned and measured memory.

    `device`: the main process's, as the driver names it, or `cpu`. `stage`: the current one of a run with stages.
    `steps`: those of all stages.
    """

    began: datetime = Field(default_factory=lambda: datetime.now().astimezone().replace(microsecond=0))
    start: NonNegativeInt
    model: ModelSpec
    strategy: Strategy
    run: RunConfig
    device: str
    emulated: bool
    out_of_memory: tuple[OutOfMemory, ...] = ()
    planned: PlannedMemory | None
    measured: MeasuredMemory | None = None
    stage: NonNegativeInt | None = None
    steps: NonNegativeInt = 0
    versions: dict[str, str] = Field(default_factory=versions)

    def write(self) -> None:
        """Write it into the run's output. Raises UserError if that fails."""
        write_json(self.run.output / RECORD, self.model_dump(mode="json"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without damaged lines."""
    return read_rows(path)[0]


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a metrics.jsonl, and the number of damaged lines. A row's `step` counts from 1."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    rows = [row for line in lines if (row := _row(line)) is not None]
    return rows, len(lines) - len(rows)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class PlannedMemory(Strict):
    """The planned peak bytes of one process, for samples of `resolution` (height, width) in pixels: allocated by phase,
    allocated in all, and reserved by torch."""

    resolution: tuple[PositiveInt, PositiveInt]
    phases: dict[str, NonNegativeInt]
    peak_allocated_bytes: PositiveInt
    peak_reserved_bytes: PositiveInt

    def compared(self, reserved_bytes: int) -> str:
        """A line that compares planned and measured reserved memory."""
        height, width = self.resolution
        return (
            f"planned {gib(self.peak_reserved_bytes)} at {height} × {width}, measured {gib(reserved_bytes)} "
            f"({off(self.peak_reserved_bytes, reserved_bytes)}) reserved by torch"
        )


def off(planned: int, measured: int) -> str:
    """By how much the measured figure is above the planned one: `+0.6 %`."""
    return f"{100 * (measured / planned - 1):+.1f} %"


def planned_memory(plan: PlanFile | None, strategy: Strategy, device: str) -> PlannedMemory | None:
    """The planned memory of these steps. None without a plan, for another strategy's plan, and on a CPU: plans count
    memory of CUDA kernels."""
    if plan is None or unplanned(strategy, plan) or device != "cuda":
        return None
    return PlannedMemory(
        resolution=plan.request.resolution,
        phases=plan.phases,
        peak_allocated_bytes=plan.expected.peak_allocated_bytes,
        peak_reserved_bytes=plan.expected.peak_reserved_bytes,
    )
