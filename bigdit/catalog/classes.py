"""Models that are conditioned on a class: how many they know, and whether a run has the classes that they take."""

from __future__ import annotations

from bigdit.catalog.families import FAMILIES
from bigdit.catalog.first_frame import first_frame_problems
from bigdit.config.run import RunConfig
from bigdit.spec import ModelSpec

CLASS_LABEL = "class_label"
"""The name of class labels among a batch's extras."""
DEFAULT_CLASSES = 1000
"""Those of ImageNet, as both DiT and PaperDiT have it where nothing else is said."""


def takes_classes(model: ModelSpec) -> bool:
    """Whether the model is conditioned on a class, and not on text."""
    return model.class_name in FAMILIES and CLASS_LABEL in FAMILIES[model.class_name].extras


def class_count(model: ModelSpec) -> int:
    """How many classes a model knows that takes them."""
    known = model.kwargs.get(FAMILIES[model.class_name].classes or "")
    return known if isinstance(known, int) else DEFAULT_CLASSES


def no_class(model: ModelSpec) -> int | None:
    """The label that stands for no class, after the last one; None where a model has none."""
    return class_count(model) if takes_classes(model) and model.kwargs.get("null_class", True) else None


def class_misfits(model: ModelSpec, classes: list[str] | int) -> list[str]:
    """What keeps the model from so many classes, or from those with these names."""
    if not takes_classes(model):
        return [f"classes, and {model.class_name} is fed text"]
    found, most = classes if isinstance(classes, int) else len(classes), class_count(model)
    key = FAMILIES[model.class_name].classes
    return [f"{found} classes, and the model's {key} is {most}"] if found > most else []


def condition_problems(run: RunConfig, model: ModelSpec) -> list[str]:
    """What keeps the model from what the run would condition it on."""
    labelled = run.data.images[0].label is not None
    if not takes_classes(model):
        said = f"data.images has a label, and {model.class_name} is fed text; leave it out, and set encoders.text"
        return [*([said] if labelled else []), *first_frame_problems(run, model)]
    if not labelled:
        return [
            f"data.images has no label, and {model.class_name} is fed classes; set it, such as to folder, and leave "
            "encoders.text out"
        ]
    problems = [f"data.classes names {misfit}" for misfit in class_misfits(model, list(run.data.classes or ()))]
    if run.data.caption_dropout and no_class(model) is None:
        problems.append(
            f"data.caption_dropout is {run.data.caption_dropout:g}, and model.kwargs.null_class is false: there is no "
            "class that stands for none; set the one to 0, or the other to true"
        )
    return problems
