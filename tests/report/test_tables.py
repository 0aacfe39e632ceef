"""No terminal is so narrow that numbers are cut: a table's rows then stand below each other."""

import pytest
from rich.console import Console

from bigdit.report.tables import table

SHOWN = {
    60: ["worker                 images  images/s", "─" * 39, "a node of the cluster    1029    1084.5"],
    26: ["worker    images  images/s", "─" * 26, "a node      1029    1084.5", "of the", "cluster"],
    20: ["a node of the", "cluster", "  images 1029,", "  images/s 1084.5"],
}


@pytest.mark.parametrize("width", SHOWN)
def test_texts_give_way_and_then_the_table_does_but_no_number(width):
    rows = table("speeds", ["worker", "images", "images/s"], numeric=["images", "images/s"])
    rows.add_row("a node of the cluster", "1029", "1084.5")
    rows.caption = "of all"
    console = Console(width=width)
    with console.capture() as captured:
        console.print(rows)
    assert [line.rstrip() for line in captured.get().splitlines()] == ["speeds", *SHOWN[width], "of all"]
