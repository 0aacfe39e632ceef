"""Rows for trackers: what TensorBoard reads of them, a resumed run, and trackers that fail."""

import json
import os
import time

import pytest
from commands import DIGITS, SINGLE, TINY
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from training import launched, run_to

from bigdit.train import prepare
from bigdit.train.monitor import trackers
from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.monitor.trackers import Trackers


def scalars(output, tag):
    """(step, value) as TensorBoard shows them."""
    read = EventAccumulator(str(output / "tensorboard"))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


def test_tensorboard_has_every_step_once_also_of_a_run_that_continues(features, tmp_path):
    chosen = ("trackers=[tensorboard]", "validation.samples=8", "validation.every=3", "validation.times=[0.5]")
    run_to(3, tmp_path, features, *chosen)
    with SummaryWriter(tmp_path / "tensorboard") as killed:  # a start that could not save its steps
        killed.add_scalar("loss", 99.0, 4)
    time.sleep(1)  # TensorBoard orders files by the second of their creation, then by their process
    run_to(5, tmp_path, features, *chosen)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert scalars(tmp_path, "loss") == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    validated = [(row["step"], pytest.approx(row["validation_loss"])) for row in rows if "validation_loss" in row]
    assert [step for step, _ in validated] == [3, 5]
    assert scalars(tmp_path, "validation_loss") == validated
    assert scalars(tmp_path, "validation_loss_by_t/0.5") == validated


def test_a_tracker_that_fails_is_a_line(tmp_path, capfd):
    (tmp_path / "tensorboard").write_text("no folder")
    with Trackers(["tensorboard"], tmp_path, 0, {}, shown=True) as failing:
        failing.add([{"step": step, "loss": 1.0} for step in range(1, 4)])
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: trackers: tensorboard failed (")
    assert line.endswith("); training continues without it")


WANDB = """import json, os, types
config = types.SimpleNamespace(update=lambda *values, **options: None)
class Run:
    last, axes = 0, {}
    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric
    def log(self, values, step=None):
        if step is not None and step < self.last:
            return  # as W&B does
        self.last = self.last if step is None else step
        with open(os.path.join(os.environ["WANDB_DIR"], "logged"), "a") as file:
            file.write(json.dumps([self.axes, values]) + "\\n")
    def finish(self):
        pass
def init(project):
    return Run()
def Image(pixels):
    return list(pixels.shape)
"""


def test_wandb_takes_rows_and_images_in_any_order(tmp_path, monkeypatch):
    (tmp_path / "packages/wandb").mkdir(parents=True)
    (tmp_path / "packages/wandb/__init__.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)
    Image.new("RGB", (3, 2)).save(tmp_path / "grid.png")
    with Trackers(["wandb"], tmp_path, 0, {}, shown=True) as trackers:
        trackers.add([{"step": 1, "loss": 3.0}])
        trackers.show(4, tmp_path / "grid.png")  # its rows come later
        trackers.add([{"step": step, "loss": 1.0} for step in (2, 3, 4, 5)])
        trackers.show(2, tmp_path / "grid.png")  # slow to decode
    logged = [json.loads(line) for line in (tmp_path / "logged").read_text().splitlines()]
    assert all(axes == {"*": "step"} for axes, _ in logged)
    rows, images = ([values for _, values in logged if key in values] for key in ("loss", "samples"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert images == [{"samples": [[2, 3, 3]], "step": 4}, {"samples": [[2, 3, 3]], "step": 2}]


def test_a_process_that_is_gone_is_a_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(trackers.sys, "executable", "/bin/false")
    with Trackers(["tensorboard"], tmp_path, 0, {"long": "x" * 100_000}, shown=True):
        pass
    assert capfd.readouterr().err == (
        "note: the process of the trackers has ended; training continues without it, metrics.jsonl has all\n"
    )


def test_the_end_does_not_wait_for_ever(tmp_path, capfd, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(trackers.sys, "executable", str(script))
    monkeypatch.setattr(trackers, "PATIENCE_S", 0.2)
    with Trackers(["tensorboard"], tmp_path, 0, {}, shown=True):
        pass
    assert "did not take the last rows" in capfd.readouterr().err


def test_other_processes_and_runs_without_trackers_start_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    for names, shown in (((), True), (("tensorboard",), False)):
        with Trackers(names, tmp_path, 0, {}, shown=shown) as idle:
            idle.add([{"step": 1, "loss": json.loads("1.0")}])
    assert not [*tmp_path.iterdir()]


def test_a_package_that_is_missing_is_named_before_anything_begins(monkeypatch, capfd):
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    overrides = [*TINY, *SINGLE, "trackers=[tensorboard,mlflow]", "output=/nowhere"]
    assert launched(DIGITS, overrides) == 1
    assert capfd.readouterr().err.splitlines() == [
        "error: trackers has tensorboard, and its package is missing; pip install 'bigdit[trackers]'",
        "error: trackers has mlflow, and its package is missing; pip install mlflow",
    ]
