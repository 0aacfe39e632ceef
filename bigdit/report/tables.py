"""Tables in the terminal: a rule under the head, numbers to the right, readable without colour."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

DASH = "–"
NARROWEST = 12
"""The least width of a text column, if it has a word of that length."""
WIDEST = 1000
"""A width in which no table is broken."""
GAP = 2
"""Spaces between columns."""


def table(title: str, columns: Sequence[str], numeric: Collection[str] = ()) -> Table:
    """An empty table; fill it with `add_row(*cells)`.

    `numeric` columns are right-aligned and never broken. In a narrow terminal the other columns shrink; if that is not
    enough, the cells of a row are printed below each other.
    """
    made = _Table(
        title=title, title_justify="left", title_style="bold", caption_justify="left", caption_style="",
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False,
    )  # fmt: skip
    for name in columns:
        number = name in numeric
        made.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return made


class _Table(Table):
    """A table that prints cells below each other, with column heads, if a terminal would cut numbers."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = sum(_least(console, column) for column in self.columns) + GAP * (len(self.columns) - 1)
        if least <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), style="bold")
        for first, *others in zip(*(column.cells for column in self.columns), strict=True):
            yield first
            yield Padding(Text(", ").join(self._headed(console, others)), (0, 0, 0, GAP))
        if self.caption:
            yield Text(str(self.caption))

    def _headed(self, console: Console, cells: Sequence[RenderableType]) -> Iterator[Text]:
        for column, found in zip(self.columns[1:], cells, strict=True):
            head = f"{column.header} " if self.show_header and column.header else ""
            yield Text(head).append_text(found if isinstance(found, Text) else console.render_str(str(found)))


def _least(console: Console, column: Column) -> int:
    """The least width of a column without cut numbers and broken words."""
    wide = console.options.update(max_width=WIDEST)
    sizes = [Measurement.get(console, wide, each) for each in (column.header, *column.cells)]
    if column.no_wrap:
        return max(size.maximum for size in sizes)
    return min(NARROWEST, max(size.minimum for size in sizes))


def lines(title: str, found: Mapping[str, str]) -> Table:
    """Names and texts side by side under a title."""
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
