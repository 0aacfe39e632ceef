"""Reports of benchmarks: memory against the micro-batch size, and steps compared with a baseline.

Memory is a table, two figures, Markdown, and a page with all of it. Comparisons show the time of a step, and its ratio
to the baseline's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup
from rich.table import Table

from bigdit import log
from bigdit.bench import Comparison, MachineLoad, Spread
from bigdit.bench.memory import Curve, MemoryBench, Point
from bigdit.files import write_json, write_text
from bigdit.memory import CATEGORIES
from bigdit.report.figures import COLOURS, LINES, canvas, draw_usable, save
from bigdit.report.html import inline, render
from bigdit.report.tables import DASH, table
from bigdit.units import GIB, count, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


JSON, MARKDOWN, PNG, PAGE = "memory.json", "memory.md", "memory.png", "memory.html"

GRADES = {
    "measured": "measured on this machine's GPU",
    "emulated": "emulated: torch's own allocator on an emulated GPU; no kernel ran",
}
"""Where the numbers of tables and figures come from."""

WHERE = {"measured": "on this machine's {}", "emulated": "on the emulated {}"}
"""How headings and figures name their GPU."""

COLUMNS = ("micro-batch", "allocated", "reserved", "process", "peak in")
OFF = "emulated %"
TIMED = ("step", "samples/s")
RETRIED = "†"
BY_CATEGORY = "Allocated at the peak, by category, on the emulated"


def write_memory(found: MemoryBench, folder: Path, command: str) -> list[Path]:
    """Write JSON, Markdown, figure and page into a folder, and return their paths. Raises UserError where that fails.

    `command`: the command line of the benchmark.
    """
    write_json(folder / JSON, found.model_dump(mode="json") | {"command": command})
    save(figure(found), folder / PNG)
    write_text(folder / MARKDOWN, markdown(found, command))
    write_text(folder / PAGE, page(found, command))
    return [folder / name for name in (JSON, MARKDOWN, PNG, PAGE)]


def title(found: MemoryBench) -> str:
    """`sana-1600m-1024 on the emulated NVIDIA A40, memory against micro-batch`."""
    return f"{found.model} {where(found)}, memory against micro-batch"


def where(found: MemoryBench) -> str:
    """`on the emulated NVIDIA A40`: the GPU, and whether it is emulated."""
    return WHERE[found.grade].format(found.gpu.title)


def subtitle(found: MemoryBench) -> str:
    """Parameters, a sample's shape, the GPU's bytes, the allocator and the grade."""
    segments = "expandable segments" if found.expandable_segments else "the default allocator"
    usable = f"{gib(found.gpu.usable_bytes)} usable" + (" (--limit)" if found.limited else "")
    latents = " × ".join(map(str, found.batch.latents))
    return f"{count(found.params)} parameters, latents {latents}, {usable}, {segments}; {GRADES[found.grade]}"


def columns(found: MemoryBench) -> list[str]:
    """Columns of the tables; errors of emulated numbers, and time, only if they are known."""
    points = [point for curve in found.curves for point in curve.points]
    ran, timed = any(point.ran for point in points), any(point.seconds_per_step for point in points)
    return [*COLUMNS, *([OFF] if ran else []), *(TIMED if timed else ())]


def rows(curve: Curve, names: Sequence[str]) -> list[list[str]]:
    """A row for each point, and one for sizes that were not run because a smaller one ran out of memory."""
    found = [_cells(point) for point in curve.points]
    if curve.left_out:
        found.append({"micro-batch": ", ".join(map(str, curve.left_out)), "allocated": "not run"})
    return [[cells.get(name, DASH) for name in names] for cells in found]


def _cells(point: Point) -> dict[str, str]:
    peaks = point.peaks
    cells = {"micro-batch": f"{point.micro_batch_size}{RETRIED if peaks.retries else ''}", OFF: _off(point)}
    if point.process is None:
        return cells | {"allocated": "out of memory"}
    low, high = point.process.low_bytes, point.process.high_bytes
    seconds, rate = point.seconds_per_step, point.samples_per_second
    return cells | {
        "allocated": gib(peaks.allocated_bytes),
        "reserved": gib(peaks.reserved_bytes),
        "process": gib(high) if low == high else f"{low / GIB:.2f}–{gib(high)}",
        "peak in": peaks.peak_phase,
        "step": DASH if seconds is None else f"{seconds:.3f} s",
        "samples/s": DASH if rate is None else f"{rate:.2f}",
    }


def retried(curve: Curve) -> list[str]:
    """A line for each size that ran after retries of the allocator."""
    return [
        f"{RETRIED} {point.micro_batch_size} ran, but the allocator had to free its cache and retry "
        f"({point.peaks.retries}×). The GPU waits for each retry, so this size does not count as fitting"
        for point in curve.points
        if point.peaks.retries
    ]


def _off(point: Point) -> str:
    """Errors of the emulated allocated and reserved bytes in %; a dash if nothing was measured."""
    ran, emulated = point.ran, point.emulated
    if ran is None:
        return DASH
    if emulated.ran_out is not None or ran.ran_out is not None:
        if emulated.ran_out is not None:
            return "the same" if ran.ran_out is not None else "out of memory"
        return f"runs, {gib(emulated.reserved_bytes)}"
    pairs = (emulated.allocated_bytes, ran.allocated_bytes), (emulated.reserved_bytes, ran.reserved_bytes)
    return " / ".join(f"{100 * (ours - theirs) / theirs:+.2f}" for ours, theirs in pairs)


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


def _named(curve: Curve) -> str:
    """The strategy as it was given; with a note on one process of an engine for several."""
    alone = curve.strategy.engine != "single" and curve.strategy.world_size == 1
    return f"{curve.asked}, 1 process," if alone else curve.asked


def by_phase(curve: Curve) -> tuple[list[str], list[list[str]]]:
    """Columns, and for each size that fits a row of allocated peaks by phase; empty if none fits."""
    fitting = [point for point in curve.points if point.peaks.fits]
    if not fitting:
        return [], []
    return ["micro-batch", *fitting[0].peaks.phases], [
        [str(point.micro_batch_size), *map(gib, point.peaks.phases.values())] for point in fitting
    ]


def by_category(found: MemoryBench) -> tuple[list[str], list[list[str]]]:
    """Columns, and for each category a row of bytes at the peak of each strategy's largest size that fits."""
    curves = [curve for curve in found.curves if curve.at_peak]
    rows = [
        [category, *(gib(curve.at_peak[category]) if category in curve.at_peak else DASH for curve in curves)]
        for category in CATEGORIES
        if any(category in curve.at_peak for curve in curves)
    ]
    return (["category", *map(_largest, curves)], rows) if rows else ([], [])


def _largest(curve: Curve) -> str:
    """`single, micro-batch 8`."""
    return f"{_named(curve).removesuffix(',')}, micro-batch {curve.largest}"


def note(found: MemoryBench) -> str:
    """What the columns mean."""
    meaning = "allocated, reserved: peaks of torch's allocator; process: as in nvidia-smi"
    if OFF not in columns(found):
        return meaning
    return f"{meaning}; {OFF}: errors of the emulated allocated / reserved bytes"


def markdown(found: MemoryBench, command: str) -> str:
    """The tables, the figure and the command."""
    names, meaning = columns(found), note(found)
    lines = [f"# {title(found)}", "", f"{subtitle(found)}. {found.written}.", "", f"![{title(found)}]({PNG})", ""]
    for curve in found.curves:
        lines += [f"## {_heading(curve, found)}", "", *_lines(names, rows(curve, names)), ""]
        lines += [part for line in retried(curve) for part in (f"{line}.", "")]
        phases, peaks = by_phase(curve)
        if peaks:
            lines += [f"### Allocated by phase, {where(found)}", "", *_lines(phases, peaks), ""]
    categories, parts = by_category(found)
    if parts:
        lines += [f"## {BY_CATEGORY} {found.gpu.title}", "", *_lines(categories, parts), ""]
    return "\n".join([*lines, f"{meaning[0].upper()}{meaning[1:]}.", "", f"    {command}", ""])


def _lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def page(found: MemoryBench, command: str) -> str:
    """The whole page, self-contained."""
    names = columns(found)
    shown: dict[str, Any] = {
        "title": title(found),
        "subtitle": subtitle(found),
        "grade": GRADES[found.grade],
        "where": where(found),
        "note": note(found),
        "found": found,
        "command": command,
        "columns": names,
        "curves": [
            (_heading(curve, found), curve, rows(curve, names), retried(curve), by_phase(curve))
            for curve in found.curves
        ],
        "figure": _inline(curves_figure(found), "curves", f"{title(found)}: {_described(found)}"),
        "by_category": f"{BY_CATEGORY} {found.gpu.title}",
        "categories": by_category(found),
        "bars": _inline(bars_figure(found), "bars", f"{BY_CATEGORY} {found.gpu.title}"),
    }
    return render("memory.html", {}, shown)


def _inline(made: Figure, name: str, description: str) -> Markup:
    return inline(made, name, description.partition(":")[0], description)


def _described(found: MemoryBench) -> str:
    return "; ".join(_heading(curve, found) for curve in found.curves) + f"; of {gib(found.gpu.usable_bytes)} usable"


def figure(found: MemoryBench) -> Figure:
    """The curves, and below them the bytes at the peaks."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(10, 6.6 + 0.6 * len(found.curves)), dpi=120, layout="constrained")
    top, below = made.subplots(2, height_ratios=[5, 1.6 + 0.6 * len(found.curves)])
    _draw_curves(top, found)
    _draw_bars(below, found)
    return made


def curves_figure(found: MemoryBench) -> Figure:
    """The process's peak in GiB against the micro-batch size: a line for each strategy, and the GPU's."""
    made, axes = canvas(10, 5)
    _draw_curves(axes, found)
    return made


def bars_figure(found: MemoryBench) -> Figure:
    """GiB by category at the peak of each strategy's largest size that fits."""
    made, axes = canvas(10, 1.6 + 0.6 * len(found.curves))
    _draw_bars(axes, found)
    return made


def _draw_curves(axes: Axes, found: MemoryBench) -> None:
    for curve, (colour, marker) in zip(found.curves, LINES * len(found.curves), strict=False):
        taken = [(point.micro_batch_size, point.process, point.peaks.fits) for point in curve.points]
        ran = [(size, process.high_bytes / GIB) for size, process, fits in taken if process is not None and fits]
        axes.plot(
            *zip(*ran, strict=True) if ran else ((), ()), marker=marker, color=colour, label=_heading(curve, found)
        )
        for size, process, fits in taken:
            if not fits:
                height = found.gpu.usable_bytes if process is None else process.high_bytes
                sign = "x" if process is None else "+"
                axes.plot([size], [height / GIB], marker=sign, markersize=10, color=colour, linestyle="")
    short = "; + ran after retries of the allocator" if any(map(retried, found.curves)) else ""
    text = f"usable {gib(found.gpu.usable_bytes)}; × ran out of memory{short}"
    draw_usable(axes, found.gpu.usable_bytes / GIB, text, 0.01, (0, 6))
    axes.set_title(f"{title(found)}\n{GRADES[found.grade]}", loc="left")
    axes.set_ylim(0, 1.2 * found.gpu.usable_bytes / GIB)
    axes.set_xlim(left=0)
    axes.set_xlabel("micro-batch size")
    axes.set_ylabel("process at its peak, GiB")
    _finish(axes, 1, -0.12, "y")


def _draw_bars(axes: Axes, found: MemoryBench) -> None:
    curves = [curve for curve in reversed(found.curves) if curve.at_peak]  # the first one on top
    rows, left = range(len(curves)), [0.0] * len(curves)
    for row, curve in zip(rows, curves, strict=True):
        axes.text(0, row + 0.26, _largest(curve), va="bottom")
    for category in CATEGORIES:
        widths = [curve.at_peak.get(category, 0) / GIB for curve in curves]
        if any(widths):
            axes.barh(rows, widths, left=left, color=COLOURS[category], label=category, height=0.5)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.axvline(found.gpu.usable_bytes / GIB, color="black", linestyle="--", linewidth=1.2)
    axes.set_title(f"{BY_CATEGORY} {found.gpu.title}", loc="left")
    axes.set_yticks([])
    axes.set_ylim(-0.4, max(len(curves), 1) - 0.3)
    axes.set_xlabel("allocated, GiB")
    _finish(axes, 5, -0.7 / (1 + len(curves)), "x")


def _finish(axes: Axes, columns: int, legend_at: float, scale: Literal["x", "y"]) -> None:
    axes.grid(axis=scale, linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(alignment="left", loc="upper left", bbox_to_anchor=(0.0, legend_at), ncols=columns, frameon=False)


def print_notes(found: Comparison) -> None:
    """Print the notes."""
    for line in found.notes:
        log.out.print(line, highlight=False, markup=False)


def load_line(load: MachineLoad) -> str:
    """`load 0.05 on 2 cores`, with a warning where the machine is busy."""
    line = f"load {load.mean:.2f} on {load.cores} cores before the benchmark"
    return f"{line}: this machine is busy, so times are too long" if load.busy else line


def comparison_table(found: Comparison) -> Table:
    """A row for each contender, the baseline first: milliseconds of a step."""
    columns = ["", "ms a step", "quartiles", "× as long", " quartiles"]
    made = table(found.what, columns, numeric=columns[1:])
    for each in found.contenders:
        ratio = [DASH, DASH] if each.of_baseline is None else _spread(each.of_baseline)
        made.add_row(each.name, *_spread(each.seconds, 1000), *ratio)
    return made


def overhead(ratio: Spread) -> str:
    """`+3.1 % (quartiles -0.4 to +5.0 %)` of a ratio of 1.031."""
    low, median, high = (f"{100 * (value - 1):+.1f}" for value in (ratio.low, ratio.median, ratio.high))
    return f"{median} % (quartiles {low} to {high} %)"


def _spread(spread: Spread, factor: float = 1) -> list[str]:
    low, median, high = (number(factor * value) for value in (spread.low, spread.median, spread.high))
    return [median, f"{low} to {high}"]


def number(value: float) -> str:
    """Three digits, and all digits before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
