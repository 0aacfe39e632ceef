"""A small picture of the gallery: a model's memory against its micro-batch, to where each card ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from pydantic import PositiveInt

from bigdit.files import replacing
from bigdit.report.timeline import COLOURS
from bigdit.spec import Strict
from bigdit.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = {False: (COLOURS["parameter"], "o", "one card"), True: (COLOURS["gradient"], "^", "8 × A40, one of them")}
"""Colour, marker and name, by whether a curve is of several cards."""
APART_GIB = 2.0
"""Lines of cards that are nearer than this have one name."""


class Point(Strict):
    """What the process takes at most at this size."""

    micro_batch: PositiveInt
    process_bytes: PositiveInt


Curve = tuple[str, bool, tuple[Point, ...]]
"""The way, whether it is of several cards, and its points."""


def draw(path: Path, model: str, ways: Sequence[str], curves: Sequence[Curve], usable: Mapping[str, int]) -> None:
    """GiB of the process against the micro-batch size, a panel a way, below the cards' lines of `usable` bytes.

    Raises UserError where it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), dpi=90, layout="constrained")
    for way, axes in zip(ways, figure.subplots(1, len(ways), sharey=True), strict=True):
        own = [(many, points) for each, many, points in curves if each == way]
        _draw_curves(axes, own)
        _draw_cards(axes, usable)
        axes.set_title(f"{model}, {way}" if own else f"{model}, {way}: fits none", loc="left", fontsize=9)
        axes.set_xlabel("micro-batch size a card; emulated, no kernel ran", fontsize=8)
    figure.axes[0].set_ylabel("process, GiB")
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    with replacing(path) as temporary:  # in few colours: a third of the bytes
        Image.open(drawn).convert("RGB").quantize(32).save(temporary, format="png", optimize=True)


def _draw_curves(axes: Axes, curves: Sequence[tuple[bool, tuple[Point, ...]]]) -> None:
    from matplotlib.ticker import MaxNLocator

    for many, (colour, marker, name) in LOOKS.items():
        label = name
        for points in (points for each, points in curves if each == many):
            sizes = [point.micro_batch for point in points]
            taken = [point.process_bytes / GIB for point in points]
            axes.plot(sizes, taken, color=colour, marker=marker, markersize=4, linewidth=1.2, label=label)
            label = ""  # said once
    if curves:
        axes.legend(loc="lower right", frameon=False, fontsize=7)
    axes.set_xlim(0, 1.04 * max((point.micro_batch for _, points in curves for point in points), default=1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_cards(axes: Axes, usable: Mapping[str, int]) -> None:
    """A line at the bytes of each card, with its name; those of nearly as many share one."""
    named: list[tuple[float, list[str]]] = []
    for name, size in sorted(usable.items(), key=lambda each: each[1]):
        axes.axhline(size / GIB, color="black", linestyle="--", linewidth=0.7)
        if named and size / GIB - named[-1][0] < APART_GIB:
            named[-1][1].append(name)
        else:
            named.append((size / GIB, [name]))
    for at, names in named:
        said, place = ", ".join(names), (0.01, at)
        axes.annotate(said, place, xycoords=axes.get_yaxis_transform(), va="bottom", fontsize=7)
    axes.set_ylim(0, 1.08 * max(usable.values()) / GIB)
