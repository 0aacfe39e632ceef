"""Memory over time as a figure: categories on one another, phases side by side, the GPU's bytes above."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bigdit.files import replacing
from bigdit.memory import CUDA_GRANULARITY, Category, Timeline
from bigdit.units import GIB, KIB, MIB, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[Category, str] = {
    "parameter": "#332288",
    "buffer": "#6699CC",
    "master weight": "#88CCEE",
    "optimizer state": "#44AA99",
    "EMA": "#117733",
    "encoder": "#BBCC33",
    "gradient": "#CC6677",
    "engine buffer": "#882255",
    "input": "#AA4499",
    "saved activation": "#DDCC77",
    "recomputed activation": "#EE7733",
    "workspace": "#222222",
    "temporary": "#DDDDDD",
}
"""One colour a category, in the order of the layers: what stays lies below, what comes and goes above.

Source: Paul Tol's colours for the colour-blind, https://personal.sron.nl/~pault: "muted", with single ones of
"vibrant", "light" and "medium-contrast"; checked in tests/report/test_timeline.py.
"""

MOST_COLUMNS = 2000
"""Points drawn, at most: more than the picture has pixels."""

LETTERS_ACROSS = 130
"""About so many letters fit beside one another over the picture."""

BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
"""Words over lines stay legible."""

Bytes = npt.NDArray[np.int64]


def plot_timeline(
    timeline: Timeline,
    path: Path,
    *,
    title: str,
    card_bytes: int | None = None,
    granularity: int = CUDA_GRANULARITY,
) -> None:
    """Draw what is allocated after each event, in multiples of `granularity`, to a PNG file.

    `card_bytes` is a GPU's usable memory, drawn as a line. Raises UserError where the file cannot be written.
    """
    figure = timeline_figure(timeline, title=title, card_bytes=card_bytes, granularity=granularity)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def timeline_figure(
    timeline: Timeline,
    *,
    title: str,
    card_bytes: int | None = None,
    granularity: int = CUDA_GRANULARITY,
    most: int = MOST_COLUMNS,
) -> Figure:
    """The same as a figure, of fewer than `most` points a category."""
    from matplotlib.figure import Figure

    live = live_bytes(timeline, granularity)
    total = live.sum(axis=0)
    peak = int(total.argmax())
    unit, name = _scale(int(total[peak]))
    figure = Figure(figsize=(12, 5.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set_ylabel(f"allocated, {name}")
    _draw_categories(axes, live, columns(total, most), peak, unit)
    _draw_phases(axes, timeline)
    _draw_limits(axes, timeline, peak, int(total[peak]), card_bytes, unit)
    return figure


def live_bytes(timeline: Timeline, granularity: int) -> Bytes:
    """[categories, events + 1] bytes allocated before the first event and after each; rows in COLOURS' order."""
    row = {category: at for at, category in enumerate(COLOURS)}
    changes = np.zeros((len(COLOURS), len(timeline.events) + 1), dtype=np.int64)
    at = 1
    for span in timeline.spans:
        for block, change in timeline.changes(span, granularity):
            changes[row[block.category], at] = change
            at += 1
    return changes.cumsum(axis=1)


def columns(total: Bytes, most: int = MOST_COLUMNS) -> Bytes:
    """The events to draw: the highest of each of fewer than `most` equal stretches, and the last event."""
    edges = np.unique(np.linspace(0, len(total), most, dtype=np.int64))
    highest = [start + int(total[start:stop].argmax()) for start, stop in itertools.pairwise(edges)]
    return np.unique([*highest, len(total) - 1])


def _scale(nbytes: int) -> tuple[int, str]:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return unit, name
    return 1, "bytes"


def _draw_categories(axes: Axes, live: Bytes, at: Bytes, peak: int, unit: int) -> None:
    categories = list(COLOURS)
    shown = [row for row in range(len(categories)) if live[row].any()]
    if shown:
        axes.stackplot(
            at,
            [live[row, at] / unit for row in shown],
            labels=[f"{categories[row]}  {gib(int(live[row, peak]))}" for row in shown],
            colors=[COLOURS[categories[row]] for row in shown],
            step="post",
            linewidth=0,
        )
    axes.set_xlim(0, max(live.shape[1] - 1, 1))
    axes.set_xlabel("allocations and frees, in order")
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],  # from above, as the layers lie
        labels[::-1],
        title=f"at the peak, of {gib(int(live[:, peak].sum()))}",
        alignment="left",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )


def _draw_phases(axes: Axes, timeline: Timeline) -> None:
    """A line where a phase begins and its name above: upright where it is short, left out where there is no room."""
    above = axes.get_xaxis_transform()
    highest = 1
    for span in timeline.spans:
        if span.start:
            axes.axvline(span.start, color="black", linewidth=0.6, alpha=0.5)
        letters = (span.stop - span.start) / max(len(timeline.events), 1) * LETTERS_ACROSS
        upright = letters < len(span.phase)
        if letters >= 2:
            middle = (span.start + span.stop) / 2
            axes.text(middle, 1.01, span.phase, transform=above, ha="center", rotation=90 if upright else 0)
            highest = max(highest, len(span.phase) if upright else 1)
    axes.set_title(axes.get_title(loc="left"), loc="left", fontweight="bold", pad=18 + 6 * highest)


def _draw_limits(axes: Axes, timeline: Timeline, peak: int, peak_bytes: int, card_bytes: int | None, unit: int) -> None:
    """The peak, and the GPU's line where it does not flatten what lies below it."""
    phase = next((span.phase for span in timeline.spans if span.start < peak <= span.stop), None)
    top = max(peak_bytes, 1)
    if card_bytes is not None:
        words = f"the GPU's usable {gib(card_bytes)}"
        if card_bytes <= 2 * top:
            top = max(top, card_bytes)
            axes.axhline(card_bytes / unit, color="black", linestyle="--", linewidth=1.2)
            axes.annotate(
                words,
                (0, card_bytes / unit),
                xycoords=axes.get_yaxis_transform(),
                xytext=(6, 5),
                textcoords="offset points",
                bbox=BEHIND,
            )
        else:
            axes.text(0.005, 0.985, f"{words}: above", transform=axes.transAxes, va="top", bbox=BEHIND)
    axes.set_ylim(0, 1.15 * top / unit)
    if phase:
        axes.annotate(
            f"peak {gib(peak_bytes)}, {phase}",
            (peak, peak_bytes / unit),
            xytext=(-16 if peak > len(timeline.events) / 2 else 16, 18),
            textcoords="offset points",
            ha="right" if peak > len(timeline.events) / 2 else "left",
            fontweight="bold",
            bbox=BEHIND,
            arrowprops={"arrowstyle": "-|>", "color": "black"},
        )
