"""metrics.jsonl of a resumed run: nothing is lost in silence."""

import json

import pytest
import torch
from disks import mounted

from bigdit.checkpoint import Peers
from bigdit.errors import UserError
from bigdit.train.measure import host_now
from bigdit.train.monitor.metrics import Metrics, read_metrics
from bigdit.train.step import StepResult


def rows(path, *steps):
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps))


def metrics(output, start, **options):
    reported = {"images": 1, "name_samples": str, "memory": host_now}
    return Metrics(output, Peers(), torch.device("cpu"), start=start, stop=9, **reported, **options)


def resumed(output, start):
    metrics(output, start)
    return [row["step"] for row in read_metrics(output / "metrics.jsonl")]


def test_rows_that_come_again_are_dropped(tmp_path, capfd):
    rows(tmp_path / "metrics.jsonl", 1, 2, 3, 4)
    assert resumed(tmp_path, 2) == [1, 2]
    assert "note" not in capfd.readouterr().err


def test_rows_of_another_course_are_put_aside_and_reported(tmp_path, capfd):
    rows(tmp_path / "metrics.jsonl", 1, 2, 3)
    assert resumed(tmp_path, 0) == []
    (aside,) = tmp_path.glob("before-*-metrics.jsonl")
    assert [row["step"] for row in read_metrics(aside)] == [1, 2, 3]
    assert f"note: training begins at step 0; {aside} holds 3 rows of an earlier run" in capfd.readouterr().err


def test_a_disk_without_room_for_more_rows_is_one_line(tmp_path):
    def fill(metrics):
        for step in range(1, 1000):
            metrics.add(step, 1e-3, StepResult(torch.tensor(1.0), None, taken=True))

    options = {"start": 0, "stop": 999, "images": 1, "name_samples": str, "memory": host_now}
    with mounted(tmp_path / "small", "size=16k") as disk:
        file = disk / "metrics.jsonl"
        with Metrics(disk, Peers(), torch.device("cpu"), **options) as metrics, pytest.raises(UserError) as error:
            fill(metrics)
        assert str(error.value) == (
            f"cannot write {file}: No space left on device; once it can be written, the same command resumes from the "
            "last checkpoint"
        )
        steps = [row["step"] for row in read_metrics(file)]
        assert steps == list(range(1, len(steps) + 1))
        assert steps


@pytest.mark.parametrize(
    "damage",
    ["", "[[", "null\n", '{"step": "1"}\n', "[" * 100_000 + "\n", '{"step": 1' + "0" * 5000 + "}\n", "\udcff\x00\n"],
    ids=["nothing", "half", "null", "text", "deep", "long", "bytes"],
)
def test_rows_that_are_lost_are_reported(tmp_path, capfd, damage):
    path = tmp_path / "metrics.jsonl"
    rows(path, 1, 3)
    path.write_text(path.read_text() + damage, errors="surrogateescape")
    assert resumed(tmp_path, 4) == [1, 3]
    assert f"note: {path} lacks readable rows of 2 of the 4 steps before this one" in capfd.readouterr().err


def test_rows_that_were_changed_are_reported(tmp_path, capfd):
    """The checkpoint has a digest of them: a flipped digit is still JSON."""
    path = tmp_path / "metrics.jsonl"
    before = metrics(tmp_path, 0)
    before.add(1, 1e-3, StepResult(torch.tensor(1.5), None, True))
    before.flush()
    metrics(tmp_path, 1, written=before.digest)
    assert "note" not in capfd.readouterr().err
    path.write_text(path.read_text().replace("1.5", "1.7"))
    metrics(tmp_path, 1, written=before.digest)
    printed = f"note: {path} was changed: its rows up to step 1 differ from the checkpoint's"
    assert printed in capfd.readouterr().err


def test_a_full_disk_is_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    full = metrics(tmp_path, 0)
    path.unlink()
    path.symlink_to("/dev/full")
    full.add(1, 1e-3, StepResult(torch.tensor(1.5), None, True))
    with pytest.raises(UserError) as refused:
        full.flush()
    assert str(refused.value) == (
        f"cannot write {path}: No space left on device; once it can be written, the same command resumes from the "
        "last checkpoint"
    )
