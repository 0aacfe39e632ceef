"""Figures: memory over time, memory against the micro-batch size, and the front of memory against speed.

Over time, categories are stacked, phases follow one another, and the GPU's memory is a line.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bigdit.files import replacing
from bigdit.memory import CUDA_GRANULARITY, Category, Timeline
from bigdit.report.words import samples
from bigdit.search.plan import Plan
from bigdit.units import GIB, gib, unit_of

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
"""A colour for each category, in the order of the layers: permanent ones below, temporary ones above.

Source: Paul Tol's colours for the colour-blind, https://personal.sron.nl/~pault: "muted", with single ones of
"vibrant", "light" and "medium-contrast"; checked in tests/report/test_timeline.py.
"""

MOST_COLUMNS = 2000
"""The most points of a curve: more than the pixels of the figure."""

LETTERS_ACROSS = 130
"""About how many letters fit on a line over the figure."""

BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
"""A box that keeps text over lines legible."""

Bytes = npt.NDArray[np.int64]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of so many inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    return figure, figure.subplots()


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file. Raises UserError if that fails."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def draw_usable(axes: Axes, height: float, text: str, at: float = 0, offset: tuple[int, int] = (6, 5)) -> None:
    """Draw the line of a GPU's usable memory, with a text above it."""
    axes.axhline(height, color="black", linestyle="--", linewidth=1.2)
    where = axes.get_yaxis_transform()
    axes.annotate(text, (at, height), xycoords=where, xytext=offset, textcoords="offset points", bbox=BEHIND)


def timeline_figure(
    timeline: Timeline, *, title: str, gpu_bytes: int | None = None, most: int = MOST_COLUMNS
) -> Figure:
    """What is allocated after each event, with fewer than `most` points per category. `gpu_bytes`: a GPU's usable
    memory, plotted as a line."""
    live = live_bytes(timeline)
    total = live.sum(axis=0)
    peak = int(total.argmax())
    unit, name = unit_of(int(total[peak]))
    figure, axes = canvas(12, 5.6)
    axes.set_title(title, loc="left")
    axes.set_ylabel(f"allocated, {name}")
    _draw_categories(axes, live, columns(total, most), peak, unit)
    _draw_phases(axes, timeline)
    _draw_limits(axes, timeline, peak, int(total[peak]), gpu_bytes, unit)
    return figure


def live_bytes(timeline: Timeline) -> Bytes:
    """[categories, events + 1] bytes allocated before the first event and after each; rows in COLOURS' order."""
    row = {category: at for at, category in enumerate(COLOURS)}
    changes = np.zeros((len(COLOURS), len(timeline.events) + 1), dtype=np.int64)
    at = 1
    for span in timeline.spans:
        for block, change in timeline.changes(span, CUDA_GRANULARITY):
            changes[row[block.category], at] = change
            at += 1
    return changes.cumsum(axis=1)


def columns(total: Bytes, most: int = MOST_COLUMNS) -> Bytes:
    """The events to plot: the highest of each of fewer than `most` equal stretches, and the last."""
    edges = np.unique(np.linspace(0, len(total), most, dtype=np.int64))
    highest = [start + int(total[start:stop].argmax()) for start, stop in itertools.pairwise(edges)]
    return np.unique([*highest, len(total) - 1])


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
    """Draw a line at the start of each phase, and its name above: vertical if it is short, none without room."""
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


def _draw_limits(axes: Axes, timeline: Timeline, peak: int, peak_bytes: int, gpu_bytes: int | None, unit: int) -> None:
    """Mark the peak, and the GPU's memory if it is at most twice the peak."""
    phase = next((span.phase for span in timeline.spans if span.start < peak <= span.stop), None)
    top = max(peak_bytes, 1)
    if gpu_bytes is not None:
        words = f"the GPU's usable {gib(gpu_bytes)}"
        if gpu_bytes <= 2 * top:
            top = max(top, gpu_bytes)
            draw_usable(axes, gpu_bytes / unit, words)
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


LINES = (
    (COLOURS["gradient"], "s"),
    (COLOURS["parameter"], "o"),
    (COLOURS["optimizer state"], "^"),
    (COLOURS["input"], "D"),
    (COLOURS["EMA"], "v"),
)
"""Colours and markers of the curves: they differ without colour too."""


def curves_figure(plan: Plan) -> Figure:
    """The process's peak in GiB against the micro-batch size, a line for each curve, with the GPU's line."""
    from matplotlib.ticker import MaxNLocator

    usable, chosen = plan.request.usable_bytes, plan.chosen
    figure, axes = canvas(10, 5)
    for (label, curve), (colour, marker) in zip(plan.curves.items(), LINES * len(plan.curves), strict=False):
        taken = [nbytes / GIB for nbytes in curve.values()]
        axes.plot([*curve], taken, color=colour, marker=marker, markersize=5, label=label)
    _draw_gpu(axes, plan, horizontal=True)
    size, held = chosen.strategy.micro_batch_size, chosen.process.high_bytes
    axes.plot([size], [held / GIB], "o", markersize=13, markerfacecolor="none", markeredgecolor="black")
    axes.annotate(
        f"{'recommended' if plan.fits else 'nearest'}: {size}, {gib(held)}",
        (size, held / GIB),
        xytext=(14, -22),
        textcoords="offset points",
        fontweight="bold",
        bbox=BEHIND,
    )
    axes.set_ylim(0, 1.3 * max(usable, held) / GIB)
    axes.set_xlim(left=0)
    axes.set_xlabel("micro-batch size per GPU")
    axes.set_ylabel("process at its peak, GiB")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes)
    return figure


def front_figure(plan: Plan) -> Figure:
    """Samples per second and GPU against the process's peak in GiB, numbered as the rows of the front."""
    figure, axes = canvas(10, 4.6)
    for at, choice in enumerate(plan.front, start=1):
        rate, held = choice.samples_per_second_per_gpu, choice.process.high_bytes / GIB
        colour = COLOURS["parameter" if choice.lossless else "gradient"]
        axes.errorbar(
            [held],
            [rate.middle],
            yerr=[[rate.middle - rate.low], [rate.high - rate.middle]],
            fmt="o" if choice.lossless else "s",
            color=colour,
            markerfacecolor=colour if choice.lossless else "white",
            markersize=13 if choice == plan.chosen else 8,
            capsize=3,
            linewidth=1,
        )
        axes.annotate(
            str(at), (held, rate.high), xytext=(0, 4), textcoords="offset points", ha="center", fontweight="bold"
        )
    _draw_gpu(axes, plan, horizontal=False)
    axes.set_ylim(0, 1.12 * max(choice.samples_per_second_per_gpu.high for choice in plan.front))
    axes.set_xlim(0, 1.1 * max([plan.request.usable_bytes, *(c.process.high_bytes for c in plan.front)]) / GIB)
    axes.set_xlabel("process at its peak, GiB")
    axes.set_ylabel(f"{samples(plan)}/s per GPU")
    marks = [
        axes.plot([], [], "o", color=COLOURS["parameter"], label="lossless")[0],
        axes.plot([], [], "s", color=COLOURS["gradient"], markerfacecolor="white", label="lossy")[0],
    ]
    _finish(axes, handles=marks, title="large: recommended" if plan.fits else "large: nearest to fitting")
    return figure


def _draw_gpu(axes: Axes, plan: Plan, *, horizontal: bool) -> None:
    """Draw the GPU's line, and below it the margin in which a plan is tight."""
    usable = plan.request.usable_bytes
    margin = plan.chosen.process.high_bytes - plan.chosen.process.low_bytes
    line, area = (axes.axhline, axes.axhspan) if horizontal else (axes.axvline, axes.axvspan)
    line(usable / GIB, color="black", linestyle="--", linewidth=1.2)
    area((usable - margin) / GIB, usable / GIB, color=COLOURS["saved activation"], alpha=0.35, linewidth=0)
    axes.annotate(
        f"usable {gib(usable)}; shaded: margin",
        (0.01, usable / GIB) if horizontal else (usable / GIB, 1.0),
        xycoords=axes.get_yaxis_transform() if horizontal else axes.get_xaxis_transform(),
        xytext=(0, 5),
        textcoords="offset points",
        ha="left" if horizontal else "right",
        bbox=BEHIND,
    )


def _finish(axes: Axes, **legend: Any) -> None:
    axes.grid(linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(alignment="left", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, **legend)
