"""benchmarks/peers.md: what its files say, and bigdit beside the scripts of others."""

import json

import peers
import pytest
from beside.measured import OURS

ROWS = json.loads(peers.BESIDE.read_text())["rows"]
FOUND = json.loads(peers.FOUND_BESIDE.read_text())


def test_the_page_says_what_was_found():
    assert peers.PAGE.read_text() == peers.page()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_no_script_takes_less_than_bigdit(row):
    """Of memory, launches and waits; and none trains larger batches."""
    found = FOUND[row["id"]]
    assert set(found) == {OURS, *row["theirs"]}
    ours = found[OURS]
    for theirs in (found[way] for way in row["theirs"]):
        assert ours["allocated_gib"] < theirs["allocated_gib"]
        assert ours["reserved_gib"] < theirs["reserved_gib"]
        assert ours["kernels"] <= theirs["kernels"]
        assert ours["library_calls"] <= theirs["library_calls"]
        assert ours["waits"] < 1.5  # whether a step is taken, and ten steps' metrics at once
        assert ours["waits"] < theirs["waits"]
        if "largest" in row["asked"]:
            assert ours["largest"] > theirs["largest"]
