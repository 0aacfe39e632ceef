"""Regularisation sets: images by the model that a run starts from, and sources with a factor of the loss."""

import json

import numpy as np
import pytest
from commands import DIGITS, SINGLE, TINY, in_process, reading, with_set
from PIL import Image
from tiny_sources import gradient, save
from training import run

from bigdit.train.record import read_metrics

ASKED = ("--caption", "a one", "--caption", "a two", "--count", "2", "--size", "8x8", "--steps", "3", "--seed", "5")
LORA = ("strategy.lora={rank: 4, alpha: 8}",)


def pixels(folder):
    return [np.asarray(Image.open(file)).tolist() for file in sorted(folder.glob("*.png")) if file.stem != "grid"]


@pytest.fixture(scope="module")
def base(trained):
    """Overrides of a run that starts from the trained weights."""
    return (*TINY, *SINGLE, f"model.init_from={trained}/exports/step-00000008/transformer")


def test_the_base_of_a_run_makes_a_folder_that_is_a_source(base, trained, tmp_path):
    done = in_process("sample", "--checkpoint", trained, *ASKED, "--out", tmp_path / "trained")
    assert done.returncode == 0, done.stderr
    for name, overrides in (("base", base), ("lora", (*base, *LORA))):
        asked = ("--config", DIGITS, *with_set(overrides), *ASKED, "--with-captions", "--out", tmp_path / name)
        done = in_process("sample", *asked, "--json")
        assert done.returncode == 0, done.stderr
        assert done.stderr.endswith(f"wrote 4 images with captions and samples.json to {tmp_path / name}\n")
        assert [row["seed"] for row in json.loads(done.stdout)["images"]] == [5, 6, 7, 8]
        assert pixels(tmp_path / name) == pixels(tmp_path / "trained")  # new adapters change nothing visible

    assert len({str(each) for each in pixels(tmp_path / "base")}) == 4
    save(tmp_path / "own/a.png", "a photo of sks", gradient(mode="L"))
    images = [f"{tmp_path}/own", {"path": f"{tmp_path}/base", "loss_weight": 0.5}]
    settings = [f"data.images={json.dumps(images)}", f"data.features={tmp_path}/f", "data.buckets=[[8, 8]]"]
    done = in_process("extract", "--config", DIGITS, *with_set(settings))
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/f: 5 of 5 images encoded" in done.stdout
    assert "samples.json" not in done.stderr
    more = [*settings, *base, *LORA, "train.steps=3", "strategy.micro_batch_size=2", "strategy.global_batch_size=2"]
    assert run(tmp_path / "f", tmp_path / "run", *more) == 0
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 3
    further = with_set((*base, *LORA, f"model.lora_from={tmp_path}/run/exports/step-00000003"))
    done = in_process("sample", "--config", DIGITS, *further, *ASKED, "--out", tmp_path / "further")
    assert done.stderr.startswith("note: model.init_from generates, without the adapters of model.lora_from\n")
    assert pixels(tmp_path / "further") == pixels(tmp_path / "base")


def test_the_loss_of_a_source_has_its_factor(tmp_path):
    """From a cache and from images, also with masks."""
    for number in range(4):
        save(tmp_path / f"images/{number}.png", f"number {number}", gradient(mode="L").rotate(90 * number))

    def losses(name, features, **source):
        images = [{"path": f"{tmp_path}/images", **source}]
        settings = [
            f"data.images={json.dumps(images)}",
            "data.buckets=[[8, 8]]",
            "train.steps=2",
            "train.warmup_steps=0",
        ]
        if features is not None:
            done = in_process("extract", "--config", DIGITS, *with_set([*settings, *reading(features)]))
            assert done.returncode == 0, done.stderr
        settings += ["strategy.micro_batch_size=4", "strategy.global_batch_size=4", "strategy.optimizer.lr=0.0001"]
        assert run(features, tmp_path / name, *settings) == 0
        return [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]

    whole = losses("whole", tmp_path / "f")
    half = losses("half", tmp_path / "f", loss_weight=0.5)
    assert half[0] == pytest.approx(whole[0] / 2, rel=1e-6)
    assert losses("online", None, loss_weight=0.5) == half
    save(tmp_path / "images/0.mask.png", None, Image.new("L", (8, 8), 128))
    masked = losses("masked", tmp_path / "m", mask="file")
    assert masked[0] < whole[0]
    assert losses("twice", tmp_path / "m", mask="file", loss_weight=2)[0] == pytest.approx(2 * masked[0], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "give one of --checkpoint DIR and --config FILE: what was trained, or what a run starts from"),
        (["--checkpoint", "x", "--config", "y"], "give one of --checkpoint DIR and --config FILE"),
        (["--checkpoint", "x", "--set", "a=1"], "--set goes with --config; a checkpoint has its own run"),
        (["--config", DIGITS, "--ema"], "--ema and --ema-width are of a checkpoint; with --config leave them out"),
        (["--config", DIGITS], "model.init_from is missing, and random weights generate noise; set it"),
        (["--config", DIGITS, "--set", "model.init_from=/nowhere"], "model.init_from: /nowhere"),
        (["--config", DIGITS, "--count", "0"], "--count is '0', and 1 or more was expected"),
    ],
)
def test_what_cannot_generate_is_one_line(tmp_path, arguments, error):
    done = in_process("sample", "--caption", "x", "--out", tmp_path / "out", *arguments)
    assert done.returncode == 1
    assert error in done.stderr
    assert not (tmp_path / "out").exists()
