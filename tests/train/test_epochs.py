"""A run or a stage by epochs of its store: the number of steps is logged first, and it resumes to the bit."""

import json
import shutil

import pytest
import torch
import yaml
from commands import DIGITS, SINGLE, TINY, bigdit, in_process, with_set
from safetensors.torch import load_file

from bigdit.config.stages import load_stages
from bigdit.errors import UserError
from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.prepare import prepare_stages
from bigdit.train.resume import steps_of, with_steps

SAMPLES, BATCH = 240, 16
EPOCHS = ("train.steps=null", "train.epochs=0.5")
STEPS = 8


@pytest.mark.parametrize(
    ("epochs", "samples", "batch", "steps"),
    [
        *((1, 240, 16, 15), (0.5, 240, 16, 8), (2, 241, 16, 31), (1e-9, 5, 8, 1)),
        (1.1, 100, 10, 11),  # as written: the float is above 1.1
    ],
)
def test_the_last_step_is_full_too(epochs, samples, batch, steps):
    assert steps_of(float(epochs), samples, batch) == steps


def length(features, *overrides):
    prepared = prepare_stages(load_stages(DIGITS, [*TINY, *SINGLE, f"data.features={features}", *overrides]))
    return with_steps(prepared)


def test_what_is_held_out_does_not_count(features):
    (found,), lines = length(features, "train.steps=null", "train.epochs=2", "validation={samples: 40}")
    assert (found.run.train.steps, found.run.train.epochs, found.end) == (25, None, 25)
    assert lines == ["train.epochs 2 of 200 samples in steps of 16: 25 steps"]
    assert length(features)[1] == []


def test_repeats_and_weights_of_sources_count(features):
    by_epochs = (features, "train.steps=null", "train.epochs=2")
    _, lines = length(*by_epochs, "data.images=[{path: x, repeats: 3, weight: 0.5}]")
    assert lines == ["train.epochs 2 of 360 samples in steps of 16: 45 steps"]
    sources = "data.images=[{path: x, weight: 0.5}, {path: appended, repeats: 2}]"
    _, lines = length(*by_epochs, sources, "validation={samples: 40}")
    assert lines == ["train.epochs 2 of 100 samples in steps of 16: 13 steps"]
    for key, wrong in (("repeats", "0"), ("weight", "0"), ("repeats", "1.5")):
        with pytest.raises(UserError, match=rf"data\.images\.{key} is {wrong}, and .* was expected$"):
            length(features, f"data.images={{path: x, {key}: {wrong}}}")


def test_the_schedule_is_held_against_what_they_come_to(features):
    with pytest.raises(UserError, match=r"^train\.warmup_steps is 9, beyond train\.steps 8$"):
        length(features, *EPOCHS, "train.warmup_steps=9")


def test_a_dry_run_says_what_they_come_to(features, tmp_path):
    def dry(features):
        settings = with_set([*TINY, *SINGLE, *EPOCHS, f"data.features={features}"])
        done = in_process("train", "--config", DIGITS, "--dry-run", *settings)
        assert done.returncode == 0, done.stderr
        train = json.loads(done.stdout)["train"]
        return (train["steps"], train["epochs"]), " ".join(done.stderr.split())

    found, printed = dry(features)
    assert found == (STEPS, None)
    assert "train.epochs 0.5 of 240 samples in steps of 16: 8 steps" in printed
    assert printed.endswith(" ok: 240 images, 3 buckets, 8 steps of 16, memory not planned (`bigdit plan --config`)")
    found, printed = dry(tmp_path)
    assert found == (None, 0.5)
    assert f"train.epochs 0.5: the number of steps is known once {tmp_path} holds features" in printed
    assert " ok: no features yet (`bigdit extract`), 3 buckets, 0.5 epochs in steps of 16, memory" in printed


@pytest.fixture(scope="module")
def staged(features, tmp_path_factory):
    """Train a run of two stages by epochs into an output. Returns the exit status."""
    folder = tmp_path_factory.mktemp("epochs")
    stages = [{"train": {"epochs": 0.5}}, {"train": {"epochs": 0.2, "warmup_steps": 0}}]
    document = yaml.safe_load(DIGITS.read_text()) | {"stages": stages}
    del document["train"]["steps"]
    document["data"]["features"] = str(features)
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    tiny = [each for each in TINY if not each.startswith("train.steps")]

    def train(output, *overrides):
        settings = with_set([*tiny, *SINGLE, f"output={output}", "train.checkpoint_every=3", *overrides])
        return bigdit("train", "--config", folder / "run.yaml", *settings)

    return train


def course(output):
    """Each step's figures, and the weights at the end."""
    rows = [(row["step"], row["stage"], row["lr"], row["loss"]) for row in read_metrics(output / "metrics.jsonl")]
    return rows, load_file(output / "exports/step-00000011/transformer/diffusion_pytorch_model.safetensors")


@pytest.mark.slow
def test_stages_by_epochs_go_on_to_the_bit(staged, tmp_path):
    """From a checkpoint of the first stage, over the border at its last epoch. With more epochs it goes on."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    done = staged(straight, "train.keep_checkpoints=9")
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stderr.split())
    assert printed.count("stages.0.train.epochs 0.5 of 240 samples in steps of 16: 8 steps") == 2  # at each start
    assert "stages.1.train.epochs 0.2 of 240 samples in steps of 16: 3 steps" in printed
    assert "stages.1: steps 9 to 11 of 11" in printed
    shutil.copytree(straight, stopped)  # set back to its first checkpoint
    for step in (6, 8, 9, 11):
        shutil.rmtree(stopped / f"checkpoints/step-{step:08d}")
    (stopped / "checkpoints/latest").write_text("step-00000003\n")
    done = staged(stopped, "train.keep_checkpoints=9")
    assert done.returncode == 0, done.stderr
    rows, weights = course(straight)
    again, weights_again = course(stopped)
    assert [row[:2] for row in rows] == [(step, int(step > STEPS)) for step in range(1, 12)]
    assert again == rows
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    printed = " ".join(staged(stopped).stderr.split())
    assert "has its 11 steps already; raise stages.1.train.epochs to continue" in printed
    moved = " ".join(staged(stopped, "stages.0.train.epochs=0.6").stderr.split())
    assert "that began at step 8, and that stage begins at 9 now" in moved
