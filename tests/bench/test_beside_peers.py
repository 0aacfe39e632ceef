"""benchmarks/peers.md: what its files say, and bigdit beside the scripts of others."""

import json
from pathlib import Path

import peers
import pytest
from beside import ours
from beside.measured import OURS

from bigdit.config import load_run
from bigdit.store.schema import read_schema

ROWS = json.loads(peers.BESIDE.read_text())["rows"]
FOUND = json.loads(peers.FOUND_BESIDE.read_text())


def test_the_page_says_what_was_found():
    assert peers.PAGE.read_text() == peers.page()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_own_side_is_a_run_with_its_features(row, tmp_path):
    (tmp_path / "weights/transformer").mkdir(parents=True)
    (tmp_path / "weights/transformer/config.json").write_text(json.dumps({"pooled_projection_dim": 768}))
    command = ours.command(row, 2, 3, tmp_path / "weights", tmp_path / "made")
    run = load_run(Path(command[command.index("--config") + 1]))
    assert (run.train.steps, run.train.micro_batch_size) == (3, 2)
    store = read_schema(run.data.features)
    assert store.count == 2 * ours.BATCHES


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
