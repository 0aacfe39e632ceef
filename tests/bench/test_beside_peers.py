"""benchmarks/peers.md: what its files say, and bigdit beside the scripts of others."""

import json
from pathlib import Path

import peers
import pytest
from beside import ours
from beside.measured import MOST, OURS, Refused, largest

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
    assert (run.train.steps, run.strategy.micro_batch_size) == (3, 2)
    store = read_schema(run.data.features)
    assert store.count == 2 * ours.BATCHES


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_no_script_takes_less_than_bigdit(row):
    """Of memory, launches, copies on the card and waits; and none trains larger batches."""
    found = FOUND[row["id"]]
    assert set(found) == {OURS, *row["theirs"]}
    ours = found[OURS]
    for theirs in (found[way] for way in row["theirs"]):
        assert ours["allocated_gib"] < theirs["allocated_gib"]
        assert ours["reserved_gib"] < theirs["reserved_gib"]
        assert ours["kernels"] <= theirs["kernels"]
        assert ours["library_calls"] <= theirs["library_calls"]
        assert ours["copies"]["on device"] <= theirs["copies"]["on device"]
        assert ours["waits"] < 1.5  # whether a step is taken, and ten steps' metrics at once
        assert ours["waits"] < theirs["waits"]
        if "largest" in row["asked"]:
            assert ours["largest"] > theirs["largest"]


@pytest.mark.parametrize("known", [None, 1, 8, 9, 10, 40, MOST])
@pytest.mark.parametrize(
    ("limit", "passes"),
    [
        *((9, lambda batch: 22 + 5.9 * batch), (76, lambda batch: max(30.4, 26.5 + 0.65 * batch))),
        *((1, lambda batch: 50 + 20 * batch), (2, lambda batch: 10 + 30 * batch)),
        (MOST, lambda batch: 5 + batch / 100),
    ],
    ids=["samples decide", "gradients decide first", "one", "two", "as many as are looked for"],
)
def test_the_largest_batch_fits_where_one_more_does_not(limit, passes, known):
    """Wherever the search begins, and in few runs: what was found before is tried first."""
    tried = []

    def taken(batch):
        tried.append(batch)
        return passes(batch) if batch <= limit else None

    assert largest(taken, passes(1), 80.0, known) == {"largest": limit}
    assert len(tried) == len(set(tried)) <= (2 if known == limit else 13)


def test_a_side_that_fails_otherwise_says_why():
    def passes(batch):
        raise Refused("no batch of prompts")

    assert largest(passes, 10.0, 80.0, None) == {"largest": 1, "why": "no batch of prompts"}
