"""Class-conditional models from end to end: a folder for each class is extracted, trained, resumed, and sampled by
name."""

import json
import shutil
from functools import cache

import numpy as np
import pytest
from commands import ONLINE, ROOT, bigdit, in_process, run_ranks, with_set
from gpus import benched
from PIL import Image

from bigdit.strategy import BatchShape
from bigdit.train.monitor.metrics import read_metrics

CONFIG = ROOT / "launch/recipes/digits-classes.yaml"
SIZE = (
    "train.warmup_steps=1",
    "train.steps=4",
    "train.checkpoint_every=2",
    "strategy.micro_batch_size=8",
    "data.workers=1",
)
TINY = {
    "PaperDiT": ("model.kwargs.depth=2", "model.kwargs.hidden_size=32"),
    "DiTTransformer2DModel": (
        "model={class_name: DiTTransformer2DModel, kwargs: {num_attention_heads: 2, attention_head_dim: 16, "
        "num_layers: 2, in_channels: 4, out_channels: 8, sample_size: 4, patch_size: 1, num_embeds_ada_norm: 10}}",
    ),
}
SEEN = ("samples={captions: [three, 0], steps: 2}", "validation={samples: 4, every: 2, times: [0.5]}")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits_by_class(tmp_path_factory):
    """Real digits, a folder a class, and their store."""
    import digits

    root = tmp_path_factory.mktemp("classes")
    digits.write_classes(root / "images")
    for file in (root / "images").glob("*/*.png"):
        if int(file.stem) >= 60:
            file.unlink()
    done = bigdit("extract", "--config", CONFIG, *settings(root))
    assert done.returncode == 0, done.stderr
    return root


def settings(root, *overrides, output="run"):
    places = [
        f"data.images={{path: {root / 'images'}, label: folder}}",
        f"data.features={root / 'features'}",
        f"output={root / output}",
    ]
    return with_set([*places, *SIZE, *overrides])


def trained(root, *overrides, output):
    """A run of one process, as `bigdit train` starts it."""
    return run_ranks(1, "-m", "bigdit.train", "--config", CONFIG, *settings(root, *overrides, output=output))


@pytest.fixture(scope="module")
def straight(digits_by_class):
    """The output of a run of a class from first step to last, trained for the first test that asks."""

    @cache
    def output(class_name):
        name = f"{class_name}-straight"
        done = trained(digits_by_class, *TINY[class_name], *SEEN, output=name)
        assert done.returncode == 0, done.stderr
        return digits_by_class / name

    return output


def test_the_store_has_the_class_of_each_folder(digits_by_class):
    schema = json.loads((digits_by_class / "features/schema.json").read_text())
    assert schema["classes"] == ["eight", "five", "four", "nine", "one", "seven", "six", "three", "two", "zero"]
    assert not (digits_by_class / "features/null_text.safetensors").exists()
    done = in_process("features", "info", digits_by_class / "features")
    assert "classes   10: eight, five, four" in done.stdout, done.stderr


@pytest.mark.parametrize("class_name", TINY)
def test_a_run_continues_from_its_checkpoint(digits_by_class, straight, class_name):
    chosen, twice = (*TINY[class_name], *SEEN), f"{class_name}-twice"
    for steps in (2, 4):
        done = trained(digits_by_class, *chosen, f"train.steps={steps}", output=twice)
        assert done.returncode == 0, done.stderr
    outputs = [straight(class_name), digits_by_class / twice]
    rows = [read_metrics(output / "metrics.jsonl") for output in outputs]
    losses = [[row["loss"] for row in each] for each in rows]
    assert len(losses[0]) == 4
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2:] != losses[0][:2]
    assert rows[0][1]["validation_loss"] == rows[1][1]["validation_loss"] > rows[0][3]["validation_loss"]
    drawn = [sorted(path.name for path in (output / "samples").iterdir()) for output in outputs]
    assert drawn == [["step-00000004.png"], ["step-00000002.png", "step-00000004.png"]]


def test_an_image_of_a_class_that_there_is_not_is_refused(digits_by_class):
    done = trained(digits_by_class, *TINY["PaperDiT"], "samples.captions=[sevn]", output="refused-picture")
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1]
        == "error: samples.captions: there is no class 'sevn'; did you mean seven? (or numbers, 0 to 9)"
    )


@pytest.mark.parametrize("class_name", TINY)
def test_a_step_of_the_run_is_predicted_to_the_byte(digits_by_class, class_name):
    receipt, _ = benched("--config", CONFIG, *settings(digits_by_class, *TINY[class_name]))
    assert receipt["batch"] == BatchShape(latents=(4, 4, 4)).model_dump(mode="json")
    assert receipt["objective"]["name"] == "ddpm"
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]


@pytest.mark.parametrize("class_name", TINY)
def test_images_are_drawn_by_names_and_numbers(straight, class_name, tmp_path):
    checkpoint, out = straight(class_name), tmp_path
    asked = ("--label", "seven", "--label", "5", "--caption", "two", "--steps", "3", "--json")
    done = in_process("sample", "--checkpoint", checkpoint, "--out", out, *asked)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["images"]
    assert [row["caption"] for row in rows] == ["seven", "5", "two"]
    assert np.asarray(Image.open(out / rows[0]["file"])).shape == (8, 8)
    drawn = {}
    # Four steps hardly tell classes apart; guidance makes the difference larger.
    for name, chosen in {
        "seven": ("seven",),
        "its number": ("5",),
        "two": ("two",),
        "away from two": ("seven", "--negative", "two"),
        "away from its number": ("seven", "--negative", "8"),
    }.items():
        more = ("--out", out / name, "--guidance", "3000", "--steps", "3", "--label", *chosen)
        done = in_process("sample", "--checkpoint", checkpoint, *more)
        assert done.returncode == 0, done.stderr
        drawn[name] = np.asarray(Image.open(out / name / "00000.png")).tolist()
    assert drawn["seven"] == drawn["its number"]
    assert drawn["away from two"] == drawn["away from its number"]
    assert drawn["seven"] not in (drawn["two"], drawn["away from two"])


@pytest.mark.parametrize(
    ("arguments", "unknown"),
    [
        (("--label", "sevn", "--label", "sevenn"), [("--label", "sevn"), ("--label", "sevenn")]),
        (("--label", "seven", "--caption", "sevn"), [("--caption", "sevn")]),
        (("--label", "sevn", "--negative", "sevenn"), [("--label", "sevn"), ("--negative", "sevenn")]),
    ],
)
def test_classes_that_there_are_not_are_refused_before_anything_is_drawn(straight, tmp_path, arguments, unknown):
    done = in_process("sample", "--checkpoint", straight("PaperDiT"), "--out", tmp_path / "out", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert " ".join(done.stderr.split()) == " ".join(
        f"error: {option}: there is no class {name!r}; did you mean seven? (or numbers, 0 to 9)"
        for option, name in unknown
    )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.kwargs.num_classes=9"], "it has 10 classes, and the model's num_classes is 9"),
        (["data.classes=[a, b]"], "it was encoded with other classes than data.classes, or in another order"),
        (["model.kwargs.sample_size=8"], "it has latents of 4x4x4, and PaperDiT takes only 8 × 8 (its sample_size)"),
    ],
)
def test_a_store_that_does_not_fit_is_refused(digits_by_class, overrides, problem):
    done = trained(digits_by_class, *overrides, output="refused")
    assert done.returncode == 1
    assert f"does not fit: {problem}" in " ".join(done.stderr.split())


def test_a_folder_of_one_more_class_is_not_appended(digits_by_class, tmp_path):
    more = tmp_path / "more/apple"
    more.mkdir(parents=True)
    Image.new("L", (8, 8)).save(more / "0.png")
    images = [{"path": str(folder), "label": "folder"} for folder in (digits_by_class / "images", tmp_path / "more")]
    changed = f"data.images={json.dumps(images)}"
    done = in_process("extract", "--config", CONFIG, *settings(digits_by_class, changed, "model.kwargs.num_classes=11"))
    assert done.returncode == 1
    assert "classes[0] is 'eight' there and 'apple' in this run" in " ".join(done.stderr.split())


def test_losses_with_features_online_are_those_of_the_store(digits_by_class, tmp_path):
    """Images of classes, encoded in each step; validation images; other classes are refused."""
    found = []
    for name, reading in {"cached": (), "online": ONLINE}.items():
        chosen = (*TINY["PaperDiT"], "samples={captions: [three, 0], steps: 2, every: 2}", *reading)
        output = f"features-{name}"
        done = trained(digits_by_class, *chosen, output=output)
        assert done.returncode == 0, done.stderr
        assert (digits_by_class / output / "samples/step-00000004.png").exists()
        found.append([row["loss"] for row in read_metrics(digits_by_class / output / "metrics.jsonl")])
    assert len(set(found[0])) == 4
    assert found[0] == found[1]
    shutil.copytree(digits_by_class / "images", tmp_path / "images")
    (tmp_path / "images/eight").rename(tmp_path / "images/acht")
    chosen = (*TINY["PaperDiT"], "train.steps=5", *ONLINE)
    images = f"data.images={{path: {tmp_path / 'images'}, label: folder}}"
    done = trained(digits_by_class, *chosen, images, output="features-online")
    assert done.returncode == 1
    assert "\nerror: data.images has other classes than " in done.stderr
    assert done.stderr.count("\n") == 2
    assert "was trained with train.steps 4, and resumes with 5" in done.stderr
