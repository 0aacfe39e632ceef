"""Memory against the micro-batch size, for people: a table, two pictures, Markdown, and a page that holds all of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from rich.table import Table

from bigdit.bench.memory import Curve, MemoryBench, Point
from bigdit.files import replacing, write_json, write_text
from bigdit.memory import CATEGORIES
from bigdit.report.curve import LINES
from bigdit.report.render import render
from bigdit.report.svg import DARK, inline, variable
from bigdit.report.tables import DASH, table
from bigdit.report.timeline import BEHIND, COLOURS
from bigdit.units import GIB, count, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

JSON, MARKDOWN, PICTURE, PAGE = "memory.json", "memory.md", "memory.png", "memory.html"

GRADES = {
    "measured": "measured on this machine's card",
    "emulated": "emulated: torch's own allocator on a card that is not there; no kernel ran",
    "rehearsed": "rehearsed: fake tensors, and our replay of torch's allocator",
}
"""What tables and pictures say of their numbers, in full."""

WHERE = {
    "measured": "on this machine's {}",
    "emulated": "on the emulated {}",
    "rehearsed": "rehearsed for the {}",
}
"""What every heading and figure says of its card."""

COLUMNS = ("micro-batch", "allocated", "reserved", "process", "peak in")
OFF = "rehearsed %"
TIMED = ("step", "samples/s")
RETRIED = "†"


def write_memory(found: MemoryBench, folder: Path, command: str) -> list[Path]:
    """Write JSON, Markdown, picture and page into a folder, and name them. Raises UserError where it cannot be written.

    `command` is what somebody typed to have this.
    """
    write_json(folder / JSON, found.model_dump(mode="json") | {"command": command})
    with replacing(folder / PICTURE) as temporary:
        figure(found).savefig(temporary, format="png")
    write_text(folder / MARKDOWN, markdown(found, command))
    write_text(folder / PAGE, page(found, command))
    return [folder / name for name in (JSON, MARKDOWN, PICTURE, PAGE)]


def title(found: MemoryBench) -> str:
    """`sana-1600m-1024 on the emulated NVIDIA A40, memory against micro-batch`."""
    return f"{found.model} {where(found)}, memory against micro-batch"


def where(found: MemoryBench) -> str:
    """`on the emulated NVIDIA A40`: the card, and the grade of what was found of it."""
    return WHERE[found.device].format(found.gpu.title)


def subtitle(found: MemoryBench) -> str:
    """Parameters, a sample's shape, the card's bytes, the allocator and the grade."""
    segments = "expandable segments" if found.expandable_segments else "the default allocator"
    usable = f"{gib(found.gpu.usable_bytes)} usable" + (" (--limit)" if found.limited else "")
    build = "" if found.build is None else f", torch {found.build.partition(',')[0]}"
    latents = " × ".join(map(str, found.batch.latents))
    return f"{count(found.params)} parameters, latents {latents}, {usable}, {segments}; {GRADES[found.device]}{build}"


def columns(found: MemoryBench) -> list[str]:
    """Of the tables: how far predictions were off only where something ran, and time only where it was taken."""
    ran = found.device != "rehearsed"
    timed = any(point.seconds_per_step for curve in found.curves for point in curve.points)
    return [*COLUMNS, *([OFF] if ran else []), *(TIMED if timed else ())]


def rows(curve: Curve, names: Sequence[str]) -> list[list[str]]:
    """The columns of these names: a row a point, and one for what was not run since a smaller size ran out."""
    found = [_cells(point) for point in curve.points]
    if curve.left_out:
        found.append({"micro-batch": ", ".join(map(str, curve.left_out)), "allocated": "not run"})
    return [[cells.get(name, DASH) for name in names] for cells in found]


def _cells(point: Point) -> dict[str, str]:
    side = point.decides
    cells = {"micro-batch": f"{point.micro_batch_size}{RETRIED if side.retries else ''}", OFF: _rehearsed(point)}
    if side.deciding is None:
        return cells | {"allocated": "out of memory"}
    assert point.process is not None  # where memory did not run out
    low, high = point.process.low_bytes, point.process.high_bytes
    seconds, rate = point.seconds_per_step, point.samples_per_second
    return cells | {
        "allocated": gib(side.deciding.allocated_bytes),
        "reserved": gib(side.reserved_bytes or 0),
        "process": gib(high) if low == high else f"{low / GIB:.2f}–{gib(high)}",
        "peak in": side.deciding.phase,
        "step": DASH if seconds is None else f"{seconds:.3f} s",
        "samples/s": DASH if rate is None else f"{rate:.2f}",
    }


def retried(curve: Curve) -> list[str]:
    """Of each size that ran without fitting, that it did, a line each."""
    return [
        f"{RETRIED} {point.micro_batch_size} ran, but only since the allocator gave back what it kept and tried again "
        f"({point.decides.retries}×), for which the card waits: as in plans, it does not count as fitting"
        for point in curve.points
        if point.decides.retries
    ]


def _rehearsed(point: Point) -> str:
    """How far the prediction of what torch allocates and reserves, made before, is off; a dash where nothing ran."""
    ran, rehearsed = point.ran, point.rehearsed
    if ran is None:
        return DASH
    if rehearsed.deciding is None or ran.deciding is None:
        return "the same" if rehearsed.deciding is ran.deciding else _one_sided(point)
    off = (
        100 * (ours - theirs) / theirs
        for ours, theirs in (
            (rehearsed.deciding.allocated_bytes, ran.deciding.allocated_bytes),
            (rehearsed.reserved_bytes or 0, ran.reserved_bytes or 1),
        )
    )
    return " / ".join(f"{each:+.2f}" for each in off)


def _one_sided(point: Point) -> str:
    reserved = point.rehearsed.reserved_bytes
    return "out of memory" if reserved is None else f"fits, {gib(reserved)}"


def tables(found: MemoryBench) -> list[Table]:
    """A table for each strategy, for the terminal."""
    made, names = [], columns(found)
    for curve in found.curves:
        rows_of = table(_heading(curve, found), names, numeric=names)
        for row in rows(curve, names):
            rows_of.add_row(*row)
        made.append(rows_of)
    return made


def _heading(curve: Curve, found: MemoryBench) -> str:
    fits = "no size fits" if curve.largest is None else f"{curve.largest} fits"
    return f"{_named(curve)} {where(found)}: {fits}"


def _bars_title(curve: Curve, found: MemoryBench) -> str:
    return f"{_named(curve)} {where(found)}: live at the peak, as rehearsed"


def _named(curve: Curve) -> str:
    """As it was asked for; of an engine that shares state out, that one process has it all where no more were asked."""
    alone = curve.strategy.engine != "single" and curve.strategy.world_size == 1
    return f"{curve.asked}, 1 process," if alone else curve.asked


def by_phase(curve: Curve) -> tuple[list[str], list[list[str]]]:
    """The columns and, a row a size that fits, the peak of each phase in allocated bytes; nothing where none fits."""
    fitting = [point for point in curve.points if point.fits]
    if not fitting:
        return [], []
    columns = ["micro-batch", *(phase.phase for phase in fitting[0].decides.phases)]
    return columns, [
        [str(point.micro_batch_size), *(gib(phase.allocated_bytes) for phase in point.decides.phases)]
        for point in fitting
    ]


def note(found: MemoryBench) -> str:
    """What the columns are."""
    said = "peaks of what torch allocates and reserves; process as nvidia-smi shows it"
    if OFF not in columns(found):
        return said
    return f"{said}; {OFF}: how far the prediction of allocated / reserved, made before, is off"


def markdown(found: MemoryBench, command: str) -> str:
    """The tables, the picture and the command."""
    names, said = columns(found), note(found)
    lines = [f"# {title(found)}", "", f"{subtitle(found)}. {found.written}.", "", f"![{title(found)}]({PICTURE})", ""]
    for curve in found.curves:
        lines += [f"## {_heading(curve, found)}", "", *_lines(names, rows(curve, names)), ""]
        lines += [part for line in retried(curve) for part in (f"{line}.", "")]
        phases, peaks = by_phase(curve)
        if peaks:
            lines += [f"### Allocated by phase, {where(found)}", "", *_lines(phases, peaks), ""]
    return "\n".join([*lines, f"{said[0].upper()}{said[1:]}.", "", f"    {command}", ""])


def _lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def page(found: MemoryBench, command: str) -> str:
    """The whole page, which needs nothing beside it."""
    names = columns(found)
    shown: dict[str, Any] = {
        "title": title(found),
        "subtitle": subtitle(found),
        "grade": GRADES[found.device],
        "where": where(found),
        "note": note(found),
        "found": found,
        "command": command,
        "columns": names,
        "curves": [
            (_heading(curve, found), curve, rows(curve, names), retried(curve), by_phase(curve))
            for curve in found.curves
        ],
        "picture": _inline(curves_figure(found), "curves", f"{title(found)}: {_told(found)}"),
        "bars": [
            _inline(bars_figure(curve, found), f"bars-{at}", _bars_title(curve, found))
            for at, curve in enumerate(found.curves)
        ],
        "colours": {variable(category): (COLOURS[category], DARK[category]) for category in CATEGORIES},
    }
    return render("memory.html", {}, shown)


def _inline(drawn: Figure, name: str, told: str) -> Markup:
    return inline(drawn, name, told.partition(":")[0], told)


def _told(found: MemoryBench) -> str:
    return "; ".join(_heading(curve, found) for curve in found.curves) + f"; of {gib(found.gpu.usable_bytes)} usable"


def figure(found: MemoryBench) -> Figure:
    """The curves, and below them a stack of categories for each strategy."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(10, 5 + 3.2 * len(found.curves)), dpi=120, layout="constrained")
    top, *below = made.subplots(1 + len(found.curves), height_ratios=[5, *[3.2] * len(found.curves)])
    _draw_curves(top, found)
    for axes, curve in zip(below, found.curves, strict=True):
        _draw_bars(axes, curve, found)
    return made


def curves_figure(found: MemoryBench) -> Figure:
    """The process's peak in GiB against the micro-batch size, a line a strategy, with the card's line."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(10, 5), dpi=120, layout="constrained")
    _draw_curves(made.subplots(), found)
    return made


def bars_figure(curve: Curve, found: MemoryBench) -> Figure:
    """What is live at each rehearsed peak, by category, in GiB."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(10, 3.6), dpi=120, layout="constrained")
    _draw_bars(made.subplots(), curve, found)
    return made


def _draw_curves(axes: Axes, found: MemoryBench) -> None:
    for curve, (colour, marker) in zip(found.curves, LINES * len(found.curves), strict=False):
        taken = [(point.micro_batch_size, point.process, point.fits) for point in curve.points]
        ran = [(size, process.high_bytes / GIB) for size, process, fits in taken if process is not None and fits]
        axes.plot(
            *zip(*ran, strict=True) if ran else ((), ()), marker=marker, color=colour, label=_heading(curve, found)
        )
        for size, process, fits in taken:
            if not fits:
                height = found.gpu.usable_bytes if process is None else process.high_bytes
                sign = "x" if process is None else "+"
                axes.plot([size], [height / GIB], marker=sign, markersize=10, color=colour, linestyle="")
    axes.axhline(found.gpu.usable_bytes / GIB, color="black", linestyle="--", linewidth=1.2)
    short = "; + ran by the allocator's retries alone" if any(map(retried, found.curves)) else ""
    axes.annotate(
        f"usable {gib(found.gpu.usable_bytes)}; × ran out of memory{short}",
        (0.01, found.gpu.usable_bytes / GIB),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 6),
        textcoords="offset points",
        bbox=BEHIND,
    )
    axes.set_title(f"{title(found)}\n{GRADES[found.device]}", loc="left")
    axes.set_ylim(0, 1.2 * found.gpu.usable_bytes / GIB)
    axes.set_xlim(left=0)
    axes.set_xlabel("micro-batch size")
    axes.set_ylabel("process at its peak, GiB")
    _finish(axes, 1, -0.12)


def _draw_bars(axes: Axes, curve: Curve, found: MemoryBench) -> None:
    places = [str(point.micro_batch_size) for point in curve.points]
    below = [0.0] * len(places)
    for category in CATEGORIES:
        heights = [point.at_peak.get(category, 0) / GIB for point in curve.points]
        if any(heights):
            axes.bar(places, heights, bottom=below, color=COLOURS[category], label=category, width=0.6)
            below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.axhline(found.gpu.usable_bytes / GIB, color="black", linestyle="--", linewidth=1.2)
    axes.set_title(_bars_title(curve, found), loc="left")
    axes.set_xlabel("micro-batch size")
    axes.set_ylabel("allocated, GiB")
    _finish(axes, 5, -0.24)


def _finish(axes: Axes, columns: int, legend_at: float) -> None:
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(alignment="left", loc="upper left", bbox_to_anchor=(0.0, legend_at), ncols=columns, frameon=False)
