"""Validation images equal those that `bigdit sample` makes of the same weights, and do not affect training."""

import numpy as np
import pytest
import torch
from commands import DIGITS, ROOT, TINY, run_ranks, with_set
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training import run_to

from bigdit import checkpoint
from bigdit.sampling import Sampler, SamplingOptions
from bigdit.train.monitor import images
from bigdit.train.monitor.metrics import read_metrics

CAPTIONS = ["a handwritten one", "a handwritten two", "a handwritten seven"]
ASKED = (
    "strategy.precision=fp32",
    "strategy.ema.decay=0.5",
    "train.steps=3",
    f"samples.captions={CAPTIONS}",
    "samples.every=2",
    "samples.steps=2",
    "samples.seed=7",
)
ROUNDING = 1  # other batch sizes take other kernels: one step of 255 at a rounding border


@pytest.fixture
def drawn(monkeypatch):
    """The images handed to the grid, by their number."""
    found = []
    monkeypatch.setattr(images, "grid_png", lambda each, captions: found.append((each, list(captions))) or png(each))
    return found


def png(each):
    from bigdit.sampling.grid import grid_png

    return grid_png(each, CAPTIONS)


def test_they_are_those_of_the_checkpoints_ema_and_training_is_the_same(features, tmp_path, drawn):
    run_to(3, tmp_path / "plain", features, *ASKED[:3])
    run_to(3, tmp_path / "run", features, *ASKED, "trackers=[tensorboard]")
    files = sorted(path.name for path in (tmp_path / "run/samples").iterdir())
    assert files == ["step-00000002.png", "step-00000003.png"]
    losses = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("plain", "run")]
    assert losses[0] == losses[1]

    found, _ = checkpoint.latest(tmp_path / "run")
    options = SamplingOptions(8, 8, steps=2, guidance=3.0, seed=7)
    wanted = [each[0].numpy() for each in Sampler(found, torch.device("cpu"), ema=True).sample(CAPTIONS, options)]
    (_, before), (last, captions) = drawn[0], drawn[1]
    assert before == captions == CAPTIONS
    assert all(np.abs(a.astype(int) - b).max() <= ROUNDING for a, b in zip(wanted, last, strict=True))
    assert np.abs(last[0].astype(int) - last[1]).max() > ROUNDING

    read = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0})
    read.Reload()
    shown = read.Images("samples/image_0") if "samples/image_0" in read.Tags()["images"] else read.Images("samples")
    with Image.open(tmp_path / "run/samples/step-00000003.png") as image:
        assert [(each.step, each.width, each.height) for each in shown] == [(step, *image.size) for step in (2, 3)]


def test_what_fails_is_a_line_and_training_continues(features, tmp_path, monkeypatch, capfd):
    def fails(each, captions):
        raise MemoryError("no room")

    monkeypatch.setattr(images, "grid_png", fails)
    run_to(3, tmp_path, features, *ASKED)
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: the validation images")]
    assert printed == [
        "note: the validation images of step 2 are not written: no room; training continues",
        "note: the validation images of step 3 are not written: no room",
    ]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("engine", [("strategy.engine=fsdp2", "strategy.ds_config=null"), ()], ids=["fsdp2", "zero3"])
def test_two_processes_draw_what_one_does(features, tmp_path, engine):
    """Three images on two processes with micro-batches of one: the last is generated twice, and counts once."""
    document = (ROOT / "ds_configs/zero2.json").read_text().replace('"stage": 2', '"stage": 3')
    (tmp_path / "ds.json").write_text(document)
    more = engine or (f"strategy.ds_config={tmp_path / 'ds.json'}",)
    chosen = [*TINY, *ASKED, *more, "strategy.micro_batch_size=1", "strategy.global_batch_size=2"]
    settings = with_set([*chosen, f"data.features={features}", f"output={tmp_path / 'run'}"])
    done = run_ranks(2, "-m", "bigdit.train", "--config", DIGITS, *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    found, _ = checkpoint.latest(tmp_path / "run")
    options = SamplingOptions(8, 8, steps=2, guidance=3.0, seed=7)
    wanted = [each[0].numpy() for each in Sampler(found, torch.device("cpu"), ema=True).sample(CAPTIONS, options)]
    with Image.open(tmp_path / "run/samples/step-00000003.png") as image:
        grid = np.asarray(image.convert("L"))
    (tmp_path / "wanted.png").write_bytes(png(wanted))
    with Image.open(tmp_path / "wanted.png") as image:
        assert np.abs(np.asarray(image.convert("L")).astype(int) - grid).max() <= 2 * ROUNDING
