"""A small image of the gallery: a model's memory against its micro-batch, to where each GPU ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image
from pydantic import PositiveInt

from bigdit.files import replacing
from bigdit.report.figures import COLOURS
from bigdit.strategy import Strict
from bigdit.units import GIB

LOOKS = (
    (COLOURS["parameter"], "o"),
    (COLOURS["optimizer state"], "^"),
    (COLOURS["input"], "D"),
    (COLOURS["EMA"], "v"),
    (COLOURS["workspace"], "x"),
    (COLOURS["gradient"], "s"),
)
"""Colours and markers of GPUs in turn: told apart without colour too."""
APART_GIB = 2.0
"""Lines of GPUs that are nearer than this are named together."""


class Point(Strict):
    """What the process takes at most at this size."""

    micro_batch: PositiveInt
    process_bytes: PositiveInt


def draw(path: Path, model: str, ways: Mapping[str, Mapping[str, Sequence[Point]]], usable: Mapping[str, int]) -> None:
    """GiB of the process against the micro-batch size, a panel a way, below the GPUs' lines of `usable` bytes. Each
    way has the points of all GPUs by their names, which may be none; the fewest samples, of the first, lie on top.

    Raises UserError where it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8), dpi=90, layout="constrained")
    lines = {}
    for (way, cards), axes in zip(ways.items(), figure.subplots(1, len(ways), sharey=True), strict=True):
        for (card, points), (colour, marker) in reversed([*zip(cards.items(), LOOKS, strict=True)]):
            if points:
                at, taken = zip(*((each.micro_batch, each.process_bytes / GIB) for each in points), strict=True)
                (lines[card],) = axes.plot(at, taken, color=colour, marker=marker, markersize=4.5, linewidth=1.2)
        for size in usable.values():
            axes.axhline(size / GIB, color="black", linestyle="--", linewidth=0.7)
        axes.set_title(f"{model}, {way}" if any(cards.values()) else f"{model}, {way}: fits none", loc="left", size=9)
        axes.set_xlabel("micro-batch per GPU; emulated, no kernel ran", fontsize=8)
        axes.set_xlim(0, 1.04 * max((each.micro_batch for points in cards.values() for each in points), default=1))
        axes.set_ylim(0, 1.08 * max(usable.values()) / GIB)
        axes.locator_params(axis="x", integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("process, GiB")
    for height, names in _near(usable):
        place = figure.axes[-1].get_yaxis_transform()
        figure.axes[-1].annotate(names, (1.01, height), xycoords=place, va="center", fontsize=7, annotation_clip=False)
    own = [card for card in ways[next(iter(ways))] if card in lines]
    figure.legend([lines[card] for card in own], own, loc="outside lower center", ncols=6, frameon=False, fontsize=7)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    # In few colours: half of the bytes. By an octree: the median cut gives a curve of few pixels another's colour.
    few = Image.open(drawn).convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE)
    with replacing(path) as temporary:
        few.save(temporary, format="png", optimize=True)


def _near(usable: Mapping[str, int]) -> list[tuple[float, str]]:
    """Where lines of GPUs lie, and their names; those of nearly as many bytes are one below the other."""
    named: list[tuple[float, str]] = []
    for name, size in sorted(usable.items(), key=lambda each: each[1]):
        if named and size / GIB - named[-1][0] < APART_GIB:
            named[-1] = named[-1][0], f"{named[-1][1]}\n{name}"
        else:
            named.append((size / GIB, name))
    return named
