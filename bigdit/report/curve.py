"""Two figures of a plan: memory against the micro-batch size, and the front of memory against speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdit.files import replacing
from bigdit.report.timeline import BEHIND, COLOURS
from bigdit.report.words import samples
from bigdit.search.plan import Curve, Plan
from bigdit.units import GIB, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_MARKERS = 12
LINES = (
    (COLOURS["gradient"], "s"),
    (COLOURS["parameter"], "o"),
    (COLOURS["optimizer state"], "^"),
    (COLOURS["input"], "D"),
    (COLOURS["EMA"], "v"),
)
"""Colours and markers of the curves in turn: told apart without colour too."""


def plot_curves(plan: Plan, path: Path) -> None:
    """Draw the curves of `plan` to a PNG file. Raises UserError where it cannot be written."""
    with replacing(path) as temporary:
        curves_figure(plan).savefig(temporary, format="png")


def curves_figure(plan: Plan) -> Figure:
    """The process's peak in GiB against the micro-batch size, a line for each curve, with the GPU's line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    usable, chosen = plan.question.gpu.usable_bytes, plan.chosen
    figure = Figure(figsize=(10, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for curve, (colour, marker) in zip(plan.curves, LINES * len(plan.curves), strict=False):
        _draw_curve(axes, curve, colour, marker)
    _draw_card(axes, plan, horizontal=True)
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


def _draw_curve(axes: Axes, curve: Curve, colour: str, marker: str) -> None:
    held = [nbytes / GIB for nbytes in curve.process_bytes]
    axes.plot(curve.micro_batch_sizes, held, color=colour, marker=marker, markersize=5, label=curve.label)


def front_figure(plan: Plan) -> Figure:
    """Samples a second per GPU against the process's peak in GiB; points are numbered as the rows of the front."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for at, choice in enumerate(plan.front, start=1):
        rate, held = choice.samples_per_second_per_card, choice.process.high_bytes / GIB
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
    _draw_card(axes, plan, horizontal=False)
    axes.set_ylim(0, 1.12 * max(choice.samples_per_second_per_card.high for choice in plan.front))
    axes.set_xlim(0, 1.1 * max([plan.question.gpu.usable_bytes, *(c.process.high_bytes for c in plan.front)]) / GIB)
    axes.set_xlabel("process at its peak, GiB")
    axes.set_ylabel(f"{samples(plan)}/s per GPU")
    marks = [
        axes.plot([], [], "o", color=COLOURS["parameter"], label="lossless")[0],
        axes.plot([], [], "s", color=COLOURS["gradient"], markerfacecolor="white", label="lossy")[0],
    ]
    _finish(axes, handles=marks, title="large: recommended" if plan.fits else "large: nearest to fitting")
    return figure


def _draw_card(axes: Axes, plan: Plan, *, horizontal: bool) -> None:
    """The GPU's line, and below it the margin in which a plan is tight."""
    usable = plan.question.gpu.usable_bytes
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
