"""The page of a run, also as JSON, from the files in its output, also while it trains."""

from __future__ import annotations

import base64
import math
import re
from io import BytesIO
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from markupsafe import Markup
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from bigdit import units
from bigdit.config.run import CHECKPOINTS, EXPORTS, METRICS, PAGE, RECEIPT, RECORD, SAMPLES
from bigdit.documents import read_json
from bigdit.errors import UserError
from bigdit.files import read_bytes, write_text
from bigdit.receipt import Receipt
from bigdit.report import words
from bigdit.report.figures import COLOURS
from bigdit.report.html import inline, render
from bigdit.train.record import RunRecord, off, read_rows

LOSSES = {"loss": "training", "validation_loss": "validation", "ema_validation_loss": "validation of EMA"}
MEMORY = {"memory_bytes": "now", "peak_memory_bytes": "peak so far", "planned_memory_bytes": "planned"}
# Colours and dashes of the lines, which differ without colour too.
LINES = ((COLOURS["parameter"], "-"), (COLOURS["gradient"], "--"), (COLOURS["optimizer state"], ":"))
MOST_POINTS = 240  # of a line; with more rows a point is the mean of several
LOG_FROM = 20  # highest over lowest value, from which a scale that need not begin with 0 is logarithmic
MOST_IMAGES, IMAGE_BYTES = 6, 150_000  # images on the page, and the bytes of each


@dataclass(frozen=True)
class Found:
    """A run's record (None for an earlier bigdit's), receipt (None before its end), rows of metrics, and images by the
    step after which they were generated. `total`: its number of steps, if known."""

    output: Path
    steps: int
    total: int | None
    record: Annotated[RunRecord | None, Field(serialization_alias="run")]
    receipt: Receipt | None
    checkpoints: list[str]
    exports: list[str]
    images: dict[int, Path]
    notices: list[str]
    rows: Annotated[list[dict[str, Any]], Field(serialization_alias="metrics")]

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of the rows with a finite number at this key."""
        rows = (row for row in self.rows if type(row.get(key)) in (int, float) and math.isfinite(row[key]))
        return [(row["step"], row[key]) for row in rows]

    def document(self) -> Any:
        """All that the page shows, as JSON; images by their paths."""
        return TypeAdapter(Found).dump_python(self, mode="json", by_alias=True)


def read_run(output: Path) -> Found:
    """Read the run in `output`. Raises UserError if it has no rows of metrics; other damaged files become notices."""
    path = output / METRICS
    try:
        rows, lost = read_rows(path)
    except OSError as error:
        raise UserError(f"report: {path} cannot be read: {error.strerror}") from None
    if not rows:
        why = "has no readable row" if path.is_file() else "does not exist"
        expected = "name the output folder of a run that has ended, or taken ten steps"
        raise UserError(f"report: {path} {why}; {expected}")
    notices = [f"{lost} of {len(rows) + lost} lines of {path} hold no row, and were left out"] if lost else []
    record: RunRecord | None = _read(output / RECORD, RunRecord, notices)
    receipt: Receipt | None = _read(output / RECEIPT, Receipt, notices)
    steps = rows[-1]["step"]
    total = None if record is None else record.steps or record.run.train.known_steps
    if record and receipt and record.start + receipt.steps != steps:
        receipt = None  # of an earlier end
    checkpoints, exports = ([path.name for path in _by_step(output / name)] for name in (CHECKPOINTS, EXPORTS))
    images = {int(path.stem[5:]): path for path in _by_step(output / SAMPLES) if path.suffix}
    return Found(output, steps, total, record, receipt, checkpoints, exports, images, notices, rows)


def _read(path: Path, kind: type[RunRecord] | type[Receipt], notices: list[str]) -> Any:
    """The content of a file; None if it is missing or damaged; damage becomes a notice."""
    try:
        return kind.model_validate(read_json(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        (first, *_) = error.errors()
        why = f"is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except ValueError as error:
        why = f"is damaged: it is {error}"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    notices.append(f"{path} {why}; it was left out")
    return None


def _by_step(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}(\.png)?", path.name))


def write_page(found: Found) -> Path:
    """Write the page into the run's output, and return its path. Raises UserError if that fails."""
    write_text(found.output / PAGE, page(found))
    return found.output / PAGE


def page(found: Found) -> str:
    """The whole page. Captions, names and paths are escaped, because users wrote them."""
    notices, run = [*found.notices], found.record and found.record.run
    shown = {
        "found": found,
        "run": run,
        "words": words,
        "off": off,
        "units": units,
        "losses": LOSSES,
        "newest": {key: series[-1] for key in dict.fromkeys(chain(*found.rows)) if (series := found.series(key))},
        "charts": charts(found),
        "images": _images(found, notices),
        "skipped": [row["step"] for row in found.rows if row.get("skipped")],
        "yaml": run and yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
        "notices": notices,
    }
    return render("run.html", {"gib": units.gib}, shown)


def charts(found: Found) -> list[Markup]:
    """The charts of all keys in the rows."""
    unit, name = units.unit_of(max((value for key in MEMORY for _, value in found.series(key)), default=1))
    asked = (
        ("Loss", LOSSES, 1, False),
        ("Norm of the gradients", {"grad_norm": "norm"}, 1, False),
        ("Learning rate", {"lr": "rate"}, 1, True),
        ("Samples a second", {"samples_per_second": "speed"}, 1, True),
        (f"Memory, {name}", MEMORY, unit, True),
        ("MFU, %", {"mfu": "MFU"}, 0.01, True),
    )
    return [_chart(found, *each) for each in asked if any(map(found.series, each[1]))]


def _chart(found: Found, title: str, keys: dict[str, str], unit: float, from_zero: bool) -> Markup:
    """A chart with a line for each key, and marks where stages begin."""
    from matplotlib.figure import Figure

    known = ((label, found.series(key)) for key, label in keys.items())
    lines = {label: np.array(series) / (1, unit) for label, series in known if series}
    figure = Figure(figsize=(5.4, 2.9))
    axes = figure.add_axes((0.12, 0.1, 0.87, 0.8))  # the same for all charts
    for (label, points), (colour, dashes) in zip(lines.items(), LINES, strict=False):
        groups = np.array_split(points, min(len(points), MOST_POINTS))
        at, middle = np.array([group.mean(axis=0) for group in groups]).T
        low, high = ([pick(group[:, 1]) for group in groups] for pick in (np.min, np.max))
        axes.fill_between(at, low, high, color=colour, alpha=0.25 * (len(points) > len(at)), linewidth=0)
        axes.plot(at, middle, dashes, color=colour, label=label, marker="o" * (len(at) <= 40), markersize=3)
    values = np.concatenate([points[:, 1] for points in lines.values()])
    if from_zero:
        axes.set_ylim(0, 1.1 * values.max() or 1)
    elif 0 < LOG_FROM * values.min() <= values.max():
        title += ", log scale"
        axes.set_yscale("log", subs=[2, 5] if values.max() < 1000 * values.min() else [])
        axes.yaxis.set_minor_formatter("{x:g}")
    for before, (step, stage) in pairwise(found.series("stage")):
        if stage != before[1]:
            line = axes.axvline(step - 1, color="#888888", linewidth=0.8)
            axes.annotate(f"stages.{stage}", (1, 1), xycoords=line, xytext=(3, -9), textcoords="offset points")
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", which="both", linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    if len(lines) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8, columnspacing=1)
    ends = (f"{label}: from {points[0, 1]:.4g} to {points[-1, 1]:.4g}" for label, points in lines.items())
    return inline(figure, title.split()[0].strip(",").lower(), f"{title}, against steps", "; ".join(ends))


def _images(found: Found, notices: list[str]) -> list[tuple[int, str, Path]]:
    """Step, image (JPEG in base64) and file, the newest first: the first, the last, and some evenly between.
    An unreadable image becomes a notice."""
    from PIL import Image

    steps, shown = list(found.images), []
    for place in np.linspace(len(steps) - 1, 0, min(len(steps), MOST_IMAGES)):
        path = found.images[steps[round(place)]]
        try:
            pixels = Image.open(BytesIO(read_bytes(path))).convert("RGB")
        except OSError as error:  # also PIL's errors for a damaged image
            notices.append(f"{path} cannot be read: {error.strerror or error}; it was left out")
            continue
        pixels.save(data := BytesIO(), "jpeg", quality=90)
        while data.tell() > IMAGE_BYTES:
            pixels = pixels.resize((pixels.width * 3 // 4 or 1, pixels.height * 3 // 4 or 1))
            pixels.save(data := BytesIO(), "jpeg", quality=90)
        shown.append((steps[round(place)], base64.b64encode(data.getvalue()).decode(), path))
    return shown
