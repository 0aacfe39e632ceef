"""Numbers of rows against the step, as lines of small pictures that a page draws.

Not by matplotlib, as the pictures of plans are: to import it and draw these takes two seconds, at the end of every run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 30
"""A picture, and its margins around the lines, in units of its own."""

MOST_POINTS = 240
"""Of a line; of more rows, each point is the mean of as many."""

MOST_MARKED = 40
"""Points that are marked one by one."""

LOG_FROM = 20
"""Highest over lowest, from which on a scale is logarithmic, where it may be."""

STYLES = (("--parameter", ""), ("--gradient", "7 3"), ("--optimizer-state", "2 3"))
"""Colours of the page and dashes of the lines in turn: told apart without colour too."""

Series = Sequence[tuple[int, float]]
"""Steps, as rows number them, and what was measured there."""


class Line(NamedTuple):
    """A line in the picture's units: `points`, those that are marked, and a `band` from lowest to highest."""

    name: str
    colour: str
    dashes: str
    points: str
    marked: list[tuple[float, float]]
    band: str


class Chart(NamedTuple):
    """A picture: its lines, marks of its axes with their places, and the places where stages begin with their names."""

    name: str
    title: str
    said: str
    lines: list[Line]
    across: list[tuple[float, str]]
    up: list[tuple[float, str]]
    borders: list[tuple[float, str]]


class Scale(NamedTuple):
    """From a value to its share of an axis, and the values that are marked."""

    low: float
    high: float
    marks: list[float]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def chart(
    name: str,
    title: str,
    series: Mapping[str, Series],
    *,
    from_zero: bool,
    borders: Mapping[int, str] = MappingProxyType({}),
) -> Chart | None:
    """The series that have values as a picture; None where none has. A scale that is not `from_zero` is logarithmic
    where values are far apart. `borders`: the steps at which stages begin, and their names."""
    known = {label: found for label, found in series.items() if found}
    if not known:
        return None
    values = [value for found in known.values() for _, value in found]
    up = linear(0.0, max(values)) if from_zero and min(values) >= 0 else _between(min(values), max(values))
    across = linear(0.0, float(max(step for found in known.values() for step, _ in found)))
    lines = [
        _line(label, found, style, across, up) for (label, found), style in zip(known.items(), STYLES, strict=False)
    ]
    said = "; ".join(
        f"{label}: {found[0][1]:.4g} at step {found[0][0]}, {found[-1][1]:.4g} at step {found[-1][0]}, "
        f"between {min(value for _, value in found):.4g} and {max(value for _, value in found):.4g}"
        for label, found in known.items()
    )
    return Chart(
        name,
        f"{title}, on a logarithmic scale" if up.logarithmic else title,
        said,
        lines,
        [(_across(across, mark), f"{mark:,.0f}") for mark in across.marks if mark == int(mark)],
        [(_up(up, mark), f"{mark:g}") for mark in up.marks],
        [(_across(across, step), each) for step, each in borders.items()],
    )


def linear(low: float, high: float) -> Scale:
    """From a mark at or below `low` to one at or above `high`, four to nine in all."""
    if low == high:
        low, high = min(low, 0.0), max(high, 0.0) or low + 1.0
    step = 10.0 ** math.floor(math.log10(high - low))
    step *= next(share for share in (0.2, 0.5, 1.0, 2.0, 5.0) if (high - low) / (share * step) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    marks = [float(f"{number * step:.12g}") for number in range(first, last + 1)]
    return Scale(marks[0], marks[-1], marks)


def _between(low: float, high: float) -> Scale:
    if low <= 0 or high < LOG_FROM * low:
        return linear(low, high)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = -(-len(decades) // 6)
    shares = (1, 2, 5) if len(decades) <= 3 else (1,)
    marks = [share * 10.0**decade for decade in decades[::every] for share in shares]
    return Scale(low, high, [float(f"{mark:.12g}") for mark in marks if low <= mark <= high], logarithmic=True)


def _line(name: str, series: Series, style: tuple[str, str], across: Scale, up: Scale) -> Line:
    stretches = _stretches(series)
    middle = [(_across(across, step), _up(up, statistics.fmean(values))) for step, values in stretches]
    above = [(_across(across, step), _up(up, max(values))) for step, values in stretches]
    below = [(_across(across, step), _up(up, min(values))) for step, values in stretches]
    band = _points(chain(above, reversed(below))) if above != below else ""
    return Line(name, *style, _points(middle), middle if len(middle) <= MOST_MARKED else [], band)


def _stretches(series: Series) -> list[tuple[float, list[float]]]:
    """Rows in groups of as many, in order: the middle step, and the values."""
    size = stretch(len(series))
    groups = [series[start : start + size] for start in range(0, len(series), size)]
    return [(statistics.fmean(step for step, _ in group), [value for _, value in group]) for group in groups]


def stretch(rows: int) -> int:
    """How many rows are one point of a line."""
    return -(-rows // MOST_POINTS)


def _across(scale: Scale, step: float) -> float:
    return LEFT + scale.share(step) * (WIDTH - LEFT - RIGHT)


def _up(scale: Scale, value: float) -> float:
    return HEIGHT - BOTTOM - scale.share(value) * (HEIGHT - TOP - BOTTOM)


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
