"""Contenders side by side, for people: what a step of each takes, and how they compare with the baseline."""

from __future__ import annotations

from rich.table import Table

from bigdit import log
from bigdit.bench.interleaved import Comparison, Load, Spread
from bigdit.report.tables import DASH, table


def print_notes(found: Comparison) -> None:
    """What else must be known, a line each."""
    for line in found.notes:
        log.out.print(line, highlight=False, markup=False)


def load_line(load: Load) -> str:
    """`load 0.05 on 2 cores`, and what it means where the machine is busy."""
    said = f"load {load.mean:.2f} on {load.cores} cores before it began"
    return f"{said}: this machine is busy, and seconds are of what it had left" if load.busy else said


def comparison_table(found: Comparison) -> Table:
    """A row a contender, the baseline first: milliseconds of steps."""
    columns = ["", "ms a step", "quartiles", "× as long", " quartiles"]
    made = table(found.what, columns, numeric=columns[1:])
    for each in found.contenders:
        ratio = [DASH, DASH] if each.of_baseline is None else _cells(each.of_baseline)
        made.add_row(each.name, *_cells(each.seconds, 1000), *ratio)
    return made


def overhead(ratio: Spread) -> str:
    """`+3.1 % (quartiles -0.4 to +5.0 %)` of a ratio of 1.031."""
    low, median, high = (f"{100 * (value - 1):+.1f}" for value in (ratio.low, ratio.median, ratio.high))
    return f"{median} % (quartiles {low} to {high} %)"


def _cells(spread: Spread, factor: float = 1) -> list[str]:
    low, median, high = (number(factor * value) for value in (spread.low, spread.median, spread.high))
    return [median, f"{low} to {high}"]


def number(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
