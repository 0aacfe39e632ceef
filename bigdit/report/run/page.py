"""The page of a run, and the same as JSON."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bigdit.config.output import PAGE
from bigdit.files import read_bytes, write_text
from bigdit.memory import CATEGORIES
from bigdit.report import words
from bigdit.report.render import render
from bigdit.report.run.curves import HEIGHT, LEFT, RIGHT, WIDTH, Chart, chart, stretch
from bigdit.report.run.found import Found
from bigdit.report.svg import DARK, variable
from bigdit.report.timeline import COLOURS
from bigdit.speed.seconds import Interval
from bigdit.train.beside_plan import off
from bigdit.train.record import RunRecord
from bigdit.units import gib, how_many, unit_of

MOST_SKIPPED = 20
"""Skipped steps that are named."""

MEMORY = {"memory_bytes": "now", "peak_memory_bytes": "peak so far", "planned_memory_bytes": "planned"}
LOSSES = {
    "loss": "training",
    "validation_loss": "validation",
    "ema_validation_loss": "validation of the average",
}


def write_page(found: Found) -> Path:
    """Write the page of a run beside what it shows, and name it. Raises UserError where it cannot be written."""
    path = found.output / PAGE
    write_text(path, page(found))
    return path


def document(found: Found) -> dict[str, Any]:
    """All that a page shows, but for pictures their paths."""
    return {
        "output": str(found.output),
        "steps": found.steps,
        "wanted": found.wanted,
        "run": None if found.record is None else found.record.model_dump(mode="json"),
        "receipt": None if found.receipt is None else found.receipt.model_dump(mode="json"),
        "checkpoints": found.checkpoints,
        "exports": found.exports,
        "pictures": {step: str(path) for step, path in found.pictures.items()},
        "notices": found.notices,
        "metrics": found.rows,
    }


def page(found: Found) -> str:
    """The whole page. Everything that is not bigdit's own is escaped: captions, names and paths are somebody's."""
    notices = [*found.notices]
    pictures = shown(found.pictures, notices)
    steps = [row["step"] for row in found.rows if row.get("skipped")]
    return render(
        "run.html",
        {"gib": gib},
        {
            "found": found,
            "title": _title(found),
            "verdict": _verdict(found),
            "facts": _facts(found),
            "charts": charts(found),
            "size": (WIDTH, HEIGHT),
            "frame": {"left": LEFT, "right": WIDTH - RIGHT},
            "stretch": stretch(len(found.rows)),
            "phases": _phases(found),
            "events": () if found.record is None else found.record.out_of_memory,
            "pictures": pictures,
            "skipped": steps[:MOST_SKIPPED],
            "more_skipped": len(steps[MOST_SKIPPED:]),
            "settings": {} if found.record is None else settings(found.record),
            "yaml": "" if found.record is None else _yaml(found.record.run.model_dump(mode="json")),
            "notices": notices,
            "colours": {variable(category): (COLOURS[category], DARK[category]) for category in CATEGORIES},
        },
    )


def _title(found: Found) -> str:
    return found.output.resolve().name if found.record is None else f"{found.record.model.name}, trained"


def _yaml(run: dict[str, Any]) -> str:
    return yaml.safe_dump(json.loads(json.dumps(run)), sort_keys=False, allow_unicode=True, width=100)


def _verdict(found: Found) -> tuple[str, str, str]:
    """A class of the page's style, a word, and what it means."""
    if found.wanted is None:
        unknown = "of how many is not known: the run left no run.json that can be read"
        return "tight", how_many(found.steps, "step"), unknown
    wanted = how_many(found.wanted, "step")
    if found.steps < found.wanted:
        return "tight", "NOT AT ITS END", f"{found.steps:,} of {wanted}; the same command goes on"
    return "fits", "DONE", f"all of {wanted}"


def _facts(found: Found) -> dict[str, tuple[str, str]]:
    """The figures at the top: name, value, and what it means."""
    samples = "videos" if _is_of_videos(found) else "images"
    facts = {}
    for key, name in LOSSES.items():
        if series := found.series(key):
            step, loss = series[-1]
            facts["loss" if key == "loss" else f"loss, {name}"] = f"{loss:.4f}", f"of step {step:,}"
    rate = found.last("samples_per_second") if found.receipt is None else found.receipt.samples_per_second
    if rate is not None:
        facts[f"{samples} a second"] = (
            words.number(rate),
            "in the last steps" if found.receipt is None else "of the last start",
        )
    if (mfu := found.last("mfu")) is not None:
        facts["MFU"] = f"{100 * mfu:.1f} %", "in the last steps"
    if (peak := found.last("peak_memory_bytes")) is not None:
        on_cpu = found.record is not None and found.record.device == "cpu"
        facts["memory at its peak"] = gib(peak), "of this process, in CPU memory" if on_cpu else "allocated by torch"
    if found.receipt is not None:
        seconds = Interval(low=found.receipt.seconds, high=found.receipt.seconds)
        facts["time"] = words.span(seconds), f"for {how_many(found.receipt.steps, 'step')} of the last start"
    return facts


def _is_of_videos(found: Found) -> bool:
    return found.record is not None and any(len(bucket) == 3 for bucket in found.record.run.data.buckets)


def charts(found: Found) -> list[Chart]:
    """The pictures of all that rows have."""
    unit, name = unit_of(max((value for key in MEMORY for _, value in found.series(key)), default=1))
    memory = {label: [(at, value / unit) for at, value in found.series(key)] for key, label in MEMORY.items()}
    rate = "Videos" if _is_of_videos(found) else "Images"
    drawn = functools.partial(chart, borders=found.borders)
    made = (
        drawn("loss", "Loss", {label: found.series(key) for key, label in LOSSES.items()}, from_zero=False),
        drawn("norm", "Norm of the gradients", {"norm": found.series("grad_norm")}, from_zero=False),
        drawn("rate", "Learning rate", {"rate": found.series("lr")}, from_zero=True),
        drawn("speed", f"{rate} a second", {"speed": found.series("samples_per_second")}, from_zero=True),
        drawn("memory", f"Memory, {name}", memory, from_zero=True),
        drawn("mfu", "MFU", {"MFU": found.series("mfu")}, from_zero=True),
    )
    return [each for each in made if each is not None]


def _phases(found: Found) -> list[dict[str, Any]]:
    """A row a phase: its name and bytes as they were measured and planned, and the lengths of its bar in %.

    Empty where nothing was measured, and on a CPU, which has no phases.
    """
    if found.record is None or found.record.measured is None or not found.record.measured.phases:
        return []
    phases, planned = found.record.measured.phases, found.record.planned
    expected = {} if planned is None else planned.phases
    longest = max([1, *(phase.allocated_bytes for phase in phases), *expected.values()])
    decides = max(phases, key=lambda phase: phase.allocated_bytes).phase
    return [
        {
            "phase": phase.phase,
            "measured": phase.allocated_bytes,
            "planned": wanted,
            "off": off(wanted, phase.allocated_bytes) if wanted else None,
            "decides": phase.phase == decides,
            "length": 100 * phase.allocated_bytes / longest,
            "line": None if wanted is None else 100 * wanted / longest,
        }
        for phase in phases
        for wanted in [expected.get(phase.phase)]
    ]


MOST = 6
"""Shown of those that were drawn: the first, the last, and evenly between."""

ALL_BYTES = 1_200_000
"""Of all pictures together, as the page has them."""

_SMALLER = 0.75


class Shown(NamedTuple):
    """A picture after `step` steps: its address, which is the picture itself, and its size in pixels; of videos, of
    which it shows some frames, the file of all that lies beside it."""

    step: int
    address: str
    width: int
    height: int
    moving: str | None


def shown(pictures: Mapping[int, Path], notices: list[str]) -> list[Shown]:
    """Pictures to show, the newest first; one that cannot be read is left out, and said."""
    steps = chosen(sorted(pictures))
    found = []
    for step in reversed(steps):
        try:
            kind, data, size = _at_most(pictures[step], ALL_BYTES * 3 // 4 // len(steps))
        except OSError as error:  # PIL's errors of a damaged picture too
            notices.append(f"{pictures[step]} cannot be read: {error.strerror or error}; it is left out")
            continue
        address = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        animation = pictures[step].with_suffix(".webp")
        found.append(Shown(step, address, *size, animation.name if animation.exists() else None))
    return found


def chosen(steps: Sequence[int]) -> list[int]:
    """At most MOST of these."""
    last = len(steps) - 1
    places = range(len(steps)) if last < MOST else (round(number * last / (MOST - 1)) for number in range(MOST))
    return [steps[place] for place in places]


def _at_most(path: Path, most: int) -> tuple[str, bytes, tuple[int, int]]:
    """Kind, bytes and size of a picture: its own file, or a JPEG that is made smaller until it has so few bytes."""
    from PIL import Image

    data = read_bytes(path)
    with Image.open(BytesIO(data)) as picture:
        picture.load()
        size, pixels = picture.size, picture.convert("RGB")
    if len(data) <= most:
        return "png", data, size
    while True:
        buffer = BytesIO()
        pixels.save(buffer, "jpeg", quality=85)
        if buffer.tell() <= most:
            return "jpeg", buffer.getvalue(), pixels.size
        width, height = (max(1, round(_SMALLER * side)) for side in pixels.size)
        pixels = pixels.resize((width, height), Image.Resampling.LANCZOS)


def settings(record: RunRecord) -> dict[str, str]:
    """A line for each of the usual settings."""
    strategy, run = record.strategy, record.run
    single_on_cpu = record.device == "cpu" and strategy.engine == "single"
    found = {
        "model": ", a ".join(dict.fromkeys((record.model.name, record.model.class_name))),
        "engine": "single process" if single_on_cpu else words.engine(strategy),
        "precision": words.PRECISIONS[strategy.precision],
        "optimizer": words.OPTIMIZERS[strategy.optimizer.name],
        "learning rate": _rate(record),
        "batch": words.step_size(strategy),
        "checkpointing": words.checkpointing(strategy, None),
        "EMA": words.average(strategy) if record.device != "cpu" or strategy.ema is None else words.emas(strategy.ema),
    }
    if strategy.compile_blocks:
        found["blocks"] = "compiled by torch"
    if strategy.lora is not None:
        found["adapters"] = f"LoRA of rank {strategy.lora.rank} over a frozen {strategy.lora.base} base"
    if run.validation is not None:
        found["validation"] = (
            f"{how_many(run.validation.samples, 'sample')}, every {how_many(run.validation.every, 'step')}"
        )
    if record.stage is not None:
        found["stage"] = f"stages.{record.stage}, whose settings these are"
    found["seed"] = f"{run.train.seed}"
    return found


def _rate(record: RunRecord) -> str:
    train, rate = record.run.train, f"{record.run.strategy.optimizer.lr:g}"
    warm = f", from step {train.warmup_steps:,} on" if train.warmup_steps else ""
    falls = {
        "constant": "",
        "cosine": f", then down a half cosine to {train.min_lr:g}",
        "wsd": f", in the last {train.decay_steps or 0:,} steps down to {train.min_lr:g}",
    }
    return f"{rate}{warm}{falls[train.lr_schedule]}"
