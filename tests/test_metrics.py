"""metrics.jsonl when a run goes on: nothing is lost without a word."""

import json

import pytest
import torch

from bigdit.checkpoint import Peers
from bigdit.train.metrics import Metrics, read_metrics


def rows(path, *steps):
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps))


def going_on(output, start):
    with Metrics(output, Peers(), torch.device("cpu"), start=start, stop=9, images=1, name_samples=str):
        pass
    return [row["step"] for row in read_metrics(output / "metrics.jsonl")]


def test_rows_that_come_again_are_dropped(tmp_path, capfd):
    rows(tmp_path / "metrics.jsonl", 0, 1, 2, 3)
    assert going_on(tmp_path, 2) == [0, 1]
    assert "note" not in capfd.readouterr().err


def test_rows_of_another_course_are_put_aside_and_said(tmp_path, capfd):
    rows(tmp_path / "metrics.jsonl", 0, 1, 2)
    assert going_on(tmp_path, 0) == []
    (aside,) = tmp_path.glob("before-*-metrics.jsonl")
    assert [row["step"] for row in read_metrics(aside)] == [0, 1, 2]
    assert f"note: training begins at step 0; 3 rows of an earlier course are now {aside}" in capfd.readouterr().err


@pytest.mark.parametrize("damage", ["", "[[", "null\n", '{"step": "1"}\n', "[" * 100_000 + "\n", "\udcff\x00\n"])
def test_rows_that_are_lost_are_said(tmp_path, capfd, damage):
    path = tmp_path / "metrics.jsonl"
    rows(path, 0, 2)
    path.write_text(path.read_text() + damage, errors="surrogateescape")
    assert going_on(tmp_path, 4) == [0, 2]
    assert f"note: {path} has no row that can be read of 2 of the 4 steps before this one" in capfd.readouterr().err
