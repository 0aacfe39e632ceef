"""Recipes in the terminal: what each needs, and the commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill

from rich.table import Table
from rich.text import Text

from bigdit.catalog import resolve_gpu
from bigdit.catalog.models import before_download
from bigdit.recipes import Recipe
from bigdit.report.tables import DASH, table
from bigdit.report.words import gibs
from bigdit.units import gib, on_disk


def listed(recipes: Sequence[Recipe]) -> Table:
    """A row for each recipe."""
    columns = ("recipe", "what", "process", "left")
    rows = table("", columns, numeric=columns[2:])
    for each in recipes:
        took = each.took
        taken = (DASH, DASH) if took is None else (gib(took.process_bytes[1]), gib(_left(each)))
        rows.add_row(each.name, each.title, *taken)
    return rows


def shown(found: Recipe, width: int) -> Iterator[Text | str]:
    """Title, needs, commands and YAML; all but commands and YAML within the width."""
    yield Text(_within(found.title, width), style="bold")
    yield ""
    yield from (_within(line, width, " " * 9) for line in needs(found))
    yield ""
    before = before_download(found.about.repository)
    if before is not None:
        yield _within(f"# gated: {before}", width, "# ")
    yield from found.commands
    yield ""
    yield found.text.rstrip("\n")


def _within(text: str, width: int, indent: str = "") -> str:
    """The text in lines of at most `width` columns, broken between words."""
    return fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def needs(found: Recipe) -> list[str]:
    """Lines on the GPU, CPU memory, disk and time that a recipe needs."""
    gpu = resolve_gpu(found.about.gpu).title
    gpu = gpu if found.processes == 1 else f"{found.processes} × {gpu}, each"
    took = found.took
    if took is None:
        return [f"GPU    {gpu}; its memory was not measured"]
    low, high = took.process_bytes
    hours = f"{took.hours[0]:.1f} to {took.hours[1]:.1f} h"
    where = "an emulated GPU" if found.processes == 1 else "emulated GPUs"
    each = "" if found.stages == 1 else " of each stage"
    disk = " to ".join(dict.fromkeys(map(on_disk, took.store_bytes)))
    by = "its profile" if "blocks_to_swap" in found.run["train"] else "the plan for it"
    waiting = f"CPU    {gib(took.waiting_bytes)} of memory in `bigdit extract`, for encoders that take turns on the GPU"
    return [
        f"GPU    {gpu}: {gibs(low, high)} of {gib(took.usable_bytes)}, {gib(_left(found))} left",
        f"       torch reserves {gib(took.peak_reserved_bytes)} of it: three steps{each} on {where}, {took.torch}",
        *_extraction(found),
        f"CPU    {gib(took.host_bytes)} of memory while it saves",
        *([waiting] if took.waiting_bytes else []),
        f"disk   {disk} of latents and embeddings for 100,000 {found.samples}",
        *_saved(found),
        f"time   {hours} of training, by {by}",
        f"       {_encoding(found)}",
        "       not counted: download, reading and decoding, samples and saving",
    ]


def _extraction(found: Recipe) -> list[str]:
    """The GPU memory for encoding."""
    assert found.took is not None
    taken = found.took.extraction
    if taken is None:
        return ["       the memory of `bigdit extract` was not measured"]
    few = "one video" if found.samples == "videos" else f"{taken.samples} images"
    turns = "; text encoders and VAE did not fit together, and took turns" if taken.ran_out else ""
    allocated, reserved = gib(taken.peak_allocated_bytes), gib(taken.peak_reserved_bytes)
    return [f"       `bigdit extract` allocates {allocated} and reserves {reserved}: {few} of each size{turns}"]


def _saved(found: Recipe) -> list[str]:
    """The disk space for checkpoints and exports."""
    assert found.took is not None
    saved = found.took.saved
    if saved is None:
        return ["       plus weights, checkpoints and exports"]
    kinds = {
        "weights": saved.weights_bytes,
        "the optimizer's state": saved.optimizer_bytes,
        "EMA": saved.ema_bytes,
    }
    parts = ", ".join(f"{on_disk(nbytes)} of {name}" for name, nbytes in kinds.items() if nbytes)
    exports = "an export" if saved.exports == 1 else f"{saved.exports} exports"
    stay = "1 stays" if saved.checkpoints == 1 else f"{saved.checkpoints} stay"
    return [
        f"       {on_disk(saved.checkpoint_bytes)} for each checkpoint ({parts}), of which {stay}",
        f"       at most {on_disk(saved.most_bytes)}: {saved.checkpoints_at_once} of them while one is written, and "
        f"{exports} of {on_disk(saved.export_bytes)}",
        "       plus the download",
    ]


def _encoding(found: Recipe) -> str:
    """The time for encoding, if it is known."""
    assert found.took is not None
    if found.took.encoding_hours is None:
        return "the time for encoding before it is unknown"
    low, high = found.took.encoding_hours
    gpus = "GPU" if found.processes == 1 else "GPUs"
    return f"{low:.1f} to {high:.1f} h before it, to encode 100,000 {found.samples} on the {gpus}"


def _left(found: Recipe) -> int:
    assert found.took is not None
    return found.took.usable_bytes - found.took.process_bytes[1]
