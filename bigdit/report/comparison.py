"""Contenders side by side, for people: what a unit of their work takes, and how they compare with the baseline."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from bigdit import log
from bigdit.bench.interleaved import Comparison, Load, Spread
from bigdit.files import write_json
from bigdit.report.tables import DASH, table

PLURALS = {"batch": "batches", "image": "images"}


def show(found: Comparison, out: Path | None, *, as_json: bool) -> None:
    """Print it, or its JSON, and write that to `out`. Raises UserError where it cannot be written."""
    document = found.model_dump(mode="json")
    if as_json:
        log.emit_json(document)
    else:
        log.out.print(load_line(found.load), highlight=False)
        log.out.print(comparison_table(found))
        print_notes(found)
    if out is not None:
        write_json(out, document)
        log.notice(f"wrote {out}")


def print_notes(found: Comparison) -> None:
    """What else must be known, a line each."""
    for line in found.notes:
        log.out.print(line, highlight=False, markup=False)


def load_line(load: Load) -> str:
    """`load 0.05 on 2 cores`, and what it means where the machine is busy."""
    said = f"load {load.mean:.2f} on {load.cores} cores before it began"
    return f"{said}: this machine is busy, and seconds are of what it had left" if load.busy else said


def comparison_table(found: Comparison) -> Table:
    """A row a contender, the baseline first: rates of batches and images, or milliseconds of steps."""
    rated = found.unit != "step"
    columns = ["", f"{PLURALS[found.unit]}/s" if rated else "ms a step", "quartiles"]
    columns += ["× as fast" if rated else "× as long", " quartiles"]
    states = any(each.state_bytes is not None for each in found.contenders)
    made = table(found.what, [*columns, *(["state"] if states else [])], numeric=(*columns[1:], "state"))
    for each in found.contenders:
        own, ratio = each.seconds.inverse() if rated else each.seconds.times(1000), each.of_baseline
        if ratio is not None and rated:
            ratio = ratio.inverse()
        cells = [*_cells(own), *([DASH, DASH] if ratio is None else _cells(ratio))]
        if states:
            cells.append(DASH if each.state_bytes is None else f"{each.state_bytes:.3f} B")
        made.add_row(each.name, *cells)
    if states:
        made.caption = "state: bytes a parameter"
    return made


def overhead(ratio: Spread) -> str:
    """`+3.1 % (quartiles -0.4 to +5.0 %)` of a ratio of 1.031."""
    low, median, high = (f"{100 * (value - 1):+.1f}" for value in (ratio.low, ratio.median, ratio.high))
    return f"{median} % (quartiles {low} to {high} %)"


def _cells(spread: Spread) -> list[str]:
    return [number(spread.median), f"{number(spread.low)} to {number(spread.high)}"]


def number(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
