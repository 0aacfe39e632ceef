"""Receipts as tables: measured values, and the values of the same run on an emulated GPU."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from bigdit.receipt import Receipt
from bigdit.report.tables import DASH, table
from bigdit.search.calibration import Checked
from bigdit.units import gib, how_many


def listed(receipts: Sequence[Receipt]) -> Table:
    """A row for each receipt: date, model, GPU, memory and time."""
    columns = ("written", "model", "GPU", "micro-batch", "reserved", "step", "samples/s")
    rows = table("", columns, numeric=columns[3:])
    for each in receipts:
        rows.add_row(
            str(each.written),
            each.model.name,
            _gpu(each),
            str(each.strategy.micro_batch_size),
            _bytes(each.measured_peak_reserved_bytes),
            _seconds(each),
            DASH if each.emulated else f"{each.samples_per_second:.2f}",
        )
    return rows


def compared(checked: Sequence[Checked]) -> Table:
    """A row for each receipt: reserved bytes, measured and emulated; seconds of a step, measured and estimated."""
    columns = ("model", "GPU", "reserved", "emulated", "off", "step", "estimated, s")
    rows = table("", columns, numeric=columns[2:])
    for each in checked:
        measured, step = each.receipt.measured_peak_reserved_bytes, each.step
        rows.add_row(
            each.receipt.model.name,
            _gpu(each.receipt),
            _bytes(measured),
            gib(each.peak_reserved_bytes),
            DASH if measured is None else f"{100 * _off(each.peak_reserved_bytes, measured):+.2f} %",
            f"{_seconds(each.receipt)}{' !' if _timed(each) and not _inside(each) else ''}",
            f"{step.seconds.low:.3f}–{step.seconds.high:.3f}",
        )
    return rows


def summary(checked: Sequence[Checked]) -> list[str]:
    """Errors of reserved bytes (median, P95, worst), and the number of measured steps within their estimates."""
    timed = [each for each in checked if _timed(each)]
    lines = []
    for emulated in (False, True):
        measured = [
            (each.peak_reserved_bytes, each.receipt.measured_peak_reserved_bytes)
            for each in checked
            if each.receipt.emulated == emulated
        ]
        errors = [abs(_off(emulated_bytes, found)) for emulated_bytes, found in measured if found is not None]
        if errors:
            lines.append(
                f"reserved bytes {'of emulated GPUs ' * emulated}off by {statistics.median(errors):.2%} (median), "
                f"{np.percentile(errors, 95):.2%} (P95), {max(errors):.2%} (worst) in {len(errors)}"
            )
    if timed:
        lines.append(
            f"{sum(map(_inside, timed))} of {how_many(len(timed), 'step')} inside the estimated interval"
            + ("" if all(map(_inside, timed)) else "; ! marks those outside")
        )
    return lines


def _gpu(each: Receipt) -> str:
    gpus = f"{each.strategy.world_size} × " if each.strategy.world_size > 1 else ""
    return f"{gpus}{each.device.removeprefix('NVIDIA ')}{' (emulated)' if each.emulated else ''}"


def _seconds(each: Receipt) -> str:
    """Seconds of a step; a dash for an emulated GPU, whose kernels do not run."""
    return DASH if each.seconds_per_step is None or each.emulated else f"{each.seconds_per_step:.3f} s"


def _bytes(found: int | None) -> str:
    return DASH if found is None else gib(found)


def _off(emulated: int, measured: int) -> float:
    return emulated / measured - 1


def _timed(each: Checked) -> bool:
    return each.receipt.seconds_per_step is not None and not each.receipt.emulated


def _inside(each: Checked) -> bool:
    seconds = each.receipt.seconds_per_step
    return seconds is not None and each.step.seconds.low <= seconds <= each.step.seconds.high
