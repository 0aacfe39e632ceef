"""benchmarks/sweep.md agrees with its files."""

import json

import sweep


def test_the_page_says_what_was_found():
    document, found = json.loads(sweep.CELLS.read_text()), json.loads(sweep.FOUND.read_text())
    assert sweep.PAGE.read_text() == sweep.page(document, found)
