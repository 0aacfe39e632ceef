"""A small image for the gallery: a model's memory against its micro-batch, up to each GPU's limit."""

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
"""Colours and markers of GPUs, which differ without colour, too."""
APART_GIB = 2.0
"""Lines of GPUs that are nearer than this share a label."""


class Point(Strict):
    """The most that the process takes at this size."""

    micro_batch: PositiveInt
    process_bytes: PositiveInt


def draw(path: Path, model: str, ways: Mapping[str, Mapping[str, Sequence[Point]]], usable: Mapping[str, int]) -> None:
    """Draw GiB of the process against the micro-batch size, a panel for each way, with a line for each GPU's `usable`
    bytes.

    Each way has the points of all GPUs by name, possibly none. The fewest samples, of the first GPU, are drawn on
    top. Raises UserError if the file cannot be written.
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
    # Few colours halve the file. An octree chooses them: the median cut gives a thin curve another's colour.
    few = Image.open(drawn).convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE)
    with replacing(path) as temporary:
        few.save(temporary, format="png", optimize=True)


def _near(usable: Mapping[str, int]) -> list[tuple[float, str]]:
    """Positions and labels of GPUs' lines. Lines with nearly as many bytes share a label."""
    named: list[tuple[float, str]] = []
    for name, size in sorted(usable.items(), key=lambda each: each[1]):
        if named and size / GIB - named[-1][0] < APART_GIB:
            named[-1] = named[-1][0], f"{named[-1][1]}\n{name}"
        else:
            named.append((size / GIB, name))
    return named
