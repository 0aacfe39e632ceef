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

LOOKS = (
    (COLOURS["parameter"], "o"),
    (COLOURS["optimizer state"], "^"),
    (COLOURS["input"], "D"),
    (COLOURS["EMA"], "v"),
    (COLOURS["workspace"], "x"),
    (COLOURS["gradient"], "s"),
)
"""Colours and markers of cards in turn: told apart without colour too."""
APART_GIB = 2.0
"""Lines of cards that are nearer than this are named together."""


class Point(Strict):
    """What the process takes at most at this size."""

    micro_batch: PositiveInt
    process_bytes: PositiveInt


Curve = tuple[str, str, tuple[Point, ...]]
"""The way, the name of its cards, and its points."""


def draw(
    path: Path,
    model: str,
    ways: Sequence[str],
    cards: Sequence[str],
    curves: Sequence[Curve],
    usable: Mapping[str, int],
) -> None:
    """GiB of the process against the micro-batch size, a panel a way, below the cards' lines of `usable` bytes.

    Each of the `cards`' names has its own colour and marker in every picture.

    Raises UserError where it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8), dpi=90, layout="constrained")
    for way, axes in zip(ways, figure.subplots(1, len(ways), sharey=True), strict=True):
        own = {name: points for each, name, points in curves if each == way}
        _draw_curves(axes, cards, own)
        _draw_lines(axes, usable)
        axes.set_title(f"{model}, {way}" if own else f"{model}, {way}: fits none", loc="left", fontsize=9)
        axes.set_xlabel("micro-batch size a card; emulated, no kernel ran", fontsize=8)
    figure.axes[0].set_ylabel("process, GiB")
    _name_lines(figure.axes[-1], usable)
    named = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    own = [name for name in cards if name in named]
    if own:
        figure.legend(
            [named[name] for name in own], own, loc="outside lower center", ncols=6, frameon=False, fontsize=7
        )
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    # In few colours: half of the bytes. By an octree: the median cut gives a curve of few pixels another's colour.
    few = Image.open(drawn).convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE)
    with replacing(path) as temporary:
        few.save(temporary, format="png", optimize=True)


def _draw_curves(axes: Axes, cards: Sequence[str], curves: Mapping[str, tuple[Point, ...]]) -> None:
    """The last cards first, so that the fewest samples, whose curves are the shortest, lie on top."""
    from matplotlib.ticker import MaxNLocator

    for name, (colour, marker) in reversed([*zip(cards, LOOKS, strict=True)]):
        sizes = [point.micro_batch for point in curves.get(name, ())]
        taken = [point.process_bytes / GIB for point in curves.get(name, ())]
        if sizes:
            axes.plot(sizes, taken, color=colour, marker=marker, markersize=4.5, linewidth=1.2, label=name)
    largest = max((point.micro_batch for points in curves.values() for point in points), default=1)
    axes.set_xlim(0, 1.04 * largest)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_lines(axes: Axes, usable: Mapping[str, int]) -> None:
    """A line at the bytes of each card."""
    for size in usable.values():
        axes.axhline(size / GIB, color="black", linestyle="--", linewidth=0.7)
    axes.set_ylim(0, 1.08 * max(usable.values()) / GIB)


def _name_lines(axes: Axes, usable: Mapping[str, int]) -> None:
    """The lines' names right of all curves; those of nearly as many bytes are one below the other."""
    named: list[tuple[float, list[str]]] = []
    for name, size in sorted(usable.items(), key=lambda each: each[1]):
        if named and size / GIB - named[-1][0] < APART_GIB:
            named[-1][1].append(name)
        else:
            named.append((size / GIB, [name]))
    for at, names in named:
        place = axes.get_yaxis_transform()
        axes.annotate("\n".join(names), (1.01, at), xycoords=place, va="center", fontsize=7, annotation_clip=False)
