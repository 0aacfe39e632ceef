"""The house style of tables: one rule under the head, no colour needed, numbers to the right."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.table import Table

DASH = "–"


def table(title: str, columns: Sequence[str], numeric: Collection[str] = ()) -> Table:
    """An empty table; fill it with `add_row(*cells)`.

    `numeric` columns are right-aligned and are never broken into lines: where the terminal is too narrow,
    the other columns give way.
    """
    made = Table(
        title=title, title_justify="left", title_style="bold", caption_justify="left", caption_style="",
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False,
    )  # fmt: skip
    for name in columns:
        number = name in numeric
        made.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return made


def cell(value: object) -> str:
    """A value as a table shows it: a dash for None, yes and no, 81.2, a × b × c for a shape."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "×".join(str(part) for part in value)
    return str(value)
