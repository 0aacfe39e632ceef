"""What class-conditional runs, and runs with captions, must set, and what they may not."""

import pytest
from commands import DIGITS, ROOT, SINGLE

from bigdit.config.stages import load_run
from bigdit.errors import UserError
from bigdit.train.prepare import prepare

CLASSES = ROOT / "launch/recipes/digits-classes.yaml"
TEXT = "encoders.text={config: {d_model: 64}}"


def problems(config, overrides):
    with pytest.raises(UserError) as error:
        prepare(load_run(config, [*SINGLE, *overrides]))
    return [
        problem.removeprefix(f"{config}: ").removeprefix(f"{config} with --set: ") for problem in error.value.problems
    ]


def test_the_recipe_of_classes_is_sound():
    run = load_run(CLASSES)
    assert run.data.images[0].label == "folder"
    assert run.strategy.micro_batch_size == 32


CASES = [
    (CLASSES, [TEXT], "encoders.text encodes captions, and data.images has a label instead; leave out one of them"),
    (
        CLASSES,
        ["data.images=[{path: a, label: folder}, b]"],
        "data.images: 1 of 2 sources have no label; give each one",
    ),
    (CLASSES, ["data.classes=[a, b, a]"], "data.classes names a twice; each class has one number"),
    (
        CLASSES,
        ["data.classes=[a, b, c]", "model.kwargs.num_classes=2"],
        "data.classes names 3 classes, and the model's num_classes is 2",
    ),
    (
        CLASSES,
        ["data.images=images", TEXT],
        "data.images has no label, and PaperDiT takes classes; set it, such as to folder, and leave encoders.text out",
    ),
    (
        CLASSES,
        ["model.kwargs.null_class=false"],
        "data.caption_dropout is 0.1, and model.kwargs.null_class is false: the model has no label for no class; set "
        "the one to 0, or the other to true",
    ),
    (CLASSES, ["encoders.first_frame={}"], "encoders.first_frame is set, and PaperDiT does not take one; leave it out"),
    (
        CLASSES,
        ["data.references=1"],
        "data.references gives 1 reference a sample, and PaperDiT takes none; leave it out",
    ),
    (
        DIGITS,
        ["data.classes=[a, b]"],
        "data.classes is set, and data.images has no label; set it, or leave data.classes out",
    ),
    (
        DIGITS,
        ["data.images={path: a, label: folder}", "encoders.text=null"],
        "data.images has a label, and SanaTransformer2DModel takes text; leave it out, and set encoders.text",
    ),
    (
        DIGITS,
        ["data.images={path: a.csv, label: x, captions: y}"],
        "data.images: captions and label are both set, and a model takes one of them; leave out the other",
    ),
    (
        DIGITS,
        ["encoders.text=null"],
        "encoders.text is missing, and no source of data.images has a label: a model needs captions or classes; set "
        "encoders.text to a mapping of pipeline, path or config; or, for a model of classes, data.images to one such "
        "as {path: FOLDER, label: folder}",
    ),
    (
        DIGITS,
        ["encoders.text={}"],
        "encoders.text needs one of pipeline (a diffusers pipeline's folder), path (a T5's folder) and config (random "
        "weights)",
    ),
]


@pytest.mark.parametrize(("config", "overrides", "problem"), CASES)
def test_what_contradicts_itself_is_one_line(config, overrides, problem):
    assert problems(config, overrides) == [problem]


def test_nothing_is_dropped_of_a_model_without_a_class_for_none():
    run = load_run(CLASSES, ["model.kwargs.null_class=false", "data.caption_dropout=0"])
    assert prepare(run).kwargs["null_class"] is False
