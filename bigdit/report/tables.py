"""The house style of tables: one rule under the head, no colour needed, numbers to the right."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

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


def lines(title: str, found: Mapping[str, str]) -> Table:
    """Names and what is said of them, side by side, under a title."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.title, made.title_justify, made.title_style = title or None, "left", "bold"
    made.add_column(no_wrap=max(map(len, found), default=0) <= 24)
    made.add_column(overflow="fold")
    for name, text in found.items():
        made.add_row(Text(name), Text(text))
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
