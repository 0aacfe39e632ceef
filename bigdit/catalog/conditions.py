"""Why a model cannot take the classes, first frames, references or masked images of a run or a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigdit.catalog.families import (
    CONTROLNET,
    FAMILIES,
    PACKING,
    can_take_first_frame,
    class_count,
    editor_of,
    embeds_first_frame,
    fills,
    is_controlled,
    no_class,
    takes_classes,
    takes_first_frame,
    takes_more_channels,
)
from bigdit.catalog.models import CatalogModel, models
from bigdit.config.run import RunConfig
from bigdit.strategy import ControlNetSpec, ModelSpec
from bigdit.units import how_many

TEXT_TOKENS = 512
"""The text states of a Wan model with image embeddings: its blocks take all states before these as the image's.
Source: diffusers 0.42.1, WanAttnProcessor."""


def first_frame_problems(run: RunConfig, model: ModelSpec) -> list[str]:
    """Why the model cannot take the run's first frame."""
    asked, known = run.encoders.first_frame, _listed(model)
    needed = takes_first_frame(model) or (known is not None and known.first_frame)
    dropout = run.data.first_frame_dropout
    if asked is None:
        if not needed:
            set_key = "first_frame_dropout" if dropout else "first_frame_noise" if run.data.first_frame_noise else None
            return [f"data.{set_key} is set, and encoders.first_frame is not; leave it out"] if set_key else []
        example = "{pipeline: FOLDER}" if embeds_first_frame(model) else "{}"
        return [f"{model.name} needs the first frame, and encoders.first_frame is missing; set it to {example}"]
    if not can_take_first_frame(model):
        return [f"encoders.first_frame is set, and {model.name} does not take one; leave it out"]
    if (asked.pipeline is not None) != embeds_first_frame(model):
        needs, found, fix = (
            ("no", "set", "leave it out") if asked.pipeline else ("an image encoder's", "missing", "set it")
        )
        key = FAMILIES[model.class_name].image_dim
        return [
            f"encoders.first_frame.pipeline is {found}, and {model.name} takes {needs} image embeddings"
            + (f" ({key})" if key else "")
            + f"; {fix}"
        ]
    if dropout and FAMILIES[model.class_name].blank and run.strategy.micro_batch_size > 1:
        return [
            f"data.first_frame_dropout is {dropout:g}, and {model.class_name} masks the image of a whole micro-batch "
            f"alone; set it to 0, or strategy.micro_batch_size, {run.strategy.micro_batch_size}, to 1"
        ]
    return []


def _listed(model: ModelSpec) -> CatalogModel | None:
    """The catalogue's model of this name, if there is one."""
    return next((each for each in models() if each.name == model.name), None)


def first_frame_misfits(
    model: ModelSpec, channels: int, found: Mapping[str, Any] | None, text_tokens: int | None
) -> list[str]:
    """Why the model cannot take a cache's first frame (StoreSchema.first_frame, None without). `channels`: of latents;
    `text_tokens`: states of a caption. That there is a first frame is checked elsewhere."""
    if found is None or not can_take_first_frame(model):
        return []
    problems, given, inputs = [], found["mask"] + channels, FAMILIES[model.class_name]
    taken, out = (model.kwargs.get(key) for key in ("in_channels", "out_channels"))
    if isinstance(taken, int) and isinstance(out, int) and taken > out and taken - out != given:
        problems.append(
            f"{given} channels of the first frame ({found['mask']} of its mask), and the model takes {taken - out} "
            f"(in_channels {taken} − out_channels {out})"
        )
    if inputs.keeps_first and taken == out and found["mask"]:
        problems.append(
            f"a mask of the first frame, and {model.name} takes its latents alone, as the VAE of Wan 2.2 5B gives them"
        )
    if (dim := model.kwargs.get(inputs.image_dim or "")) is not None:
        if (found.get("tokens"), found.get("dim")) != (inputs.image_tokens, dim):
            there = f"{found['tokens']} × {found['dim']}" if "dim" in found else "no"
            problems.append(f"{there} embeddings of the first frame, and the model takes {inputs.image_tokens} × {dim}")
        if not inputs.blank and text_tokens not in (None, TEXT_TOKENS):
            problems.append(f"{text_tokens} states of text, and with an image the model takes {TEXT_TOKENS}")
    return problems


def reference_misfits(model: ModelSpec, found: int) -> list[str]:
    """Why the model cannot take samples that are edits of `found` images."""
    known = _listed(model)
    least = int(is_controlled(model)) if known is None else known.references
    named, most = most_references(model)
    if found > most:
        return [f"{how_many(found, 'reference')} a sample, and {named} takes {most or 'none'}"]
    if found < least:
        return [f"{how_many(found, 'reference')} a sample, and {model.name} takes {how_many(least, 'image')}"]
    return []


def most_references(model: ModelSpec) -> tuple[str, int]:
    """The most images that a sample can be an edit of, after the name that says so: the model's pipeline or class."""
    known = _listed(model)
    if known is not None and known.editor is not None:
        return known.editor, editor_of(known.editor).references
    return model.class_name, FAMILIES[model.class_name].references if model.class_name in FAMILIES else 0


def controlnet_problems(model: ModelSpec, asked: ControlNetSpec) -> list[str]:
    """Why the model cannot have such a ControlNet."""
    inputs = FAMILIES.get(model.class_name)
    if inputs is None or inputs.controlnet is None:
        have = ", ".join(name for name, each in FAMILIES.items() if each.controlnet)
        return [f"bigdit trains no ControlNet of {model.class_name}; {have} have one"]
    known = _listed(model)
    if takes_more_channels(model) or (known is not None and known.references):
        return [
            f"{model.name} takes an image itself, and ControlNets are for models that take only text; name its base"
        ]
    named: list[Any] = [model.kwargs.get(key) for key in inputs.depths.values()]
    depths = named if known is None else [length for _, length in known.block_lists]
    sizes = {"layers": asked.layers, "single_layers": asked.single_layers}
    most = dict(zip(sizes, (*depths, 0), strict=False))
    return [
        f"{key} is {size}, and {model.name} has {most[key]} such blocks; set it to {most[key]} or less"
        for key, size in sizes.items()
        if isinstance(most[key], int) and size > most[key]
    ]


def with_controlnet(model: CatalogModel, asked: ControlNetSpec) -> CatalogModel:
    """The model with a ControlNet: with its blocks, and one image per sample."""
    return model.model_copy(update={"references": 1, "block_lists": (*model.block_lists, (CONTROLNET, asked.blocks))})


def _reference_problems(run: RunConfig, model: ModelSpec) -> list[str]:
    if (asked := run.strategy.controlnet) is not None:
        problems = [f"strategy.controlnet: {each}" for each in controlnet_problems(model, asked)]
        if not problems and run.data.references != 1:
            there = f"data.references is {run.data.references}"
            problems.append(f"strategy.controlnet takes one image a sample, and {there}; set it to 1")
        elif not problems and run.data.min_references == 0:
            problems.append("data.min_references is 0, and a ControlNet takes an image of each sample; leave it out")
        return problems
    if is_controlled(model) and run.data.min_references == 0:
        return [f"data.min_references is 0, and {model.name} takes an image of each sample; leave it out"]
    _, most = most_references(model)
    fix = f"set it to {min(max(run.data.references, 1), most)}" if most else "leave it out"
    return [f"data.references gives {each}; {fix}" for each in reference_misfits(model, run.data.references)]


def fill_misfits(model: ModelSpec, found: int) -> list[str]:
    """Why the model cannot take samples with `found` channels of masked images and masks."""
    if not fills(model):
        return [f"masked images, which {model.name} does not take"] if found else []
    taken = (model.kwargs["in_channels"] - model.kwargs["out_channels"]) // PACKING**2
    if not found:
        return [f"no masked images, which {model.name} needs"]
    return [] if found == taken else [f"{found} channels of masked images, and {model.name} takes {taken}"]


def _fill_problems(run: RunConfig, model: ModelSpec) -> list[str]:
    if run.data.fill == fills(model):
        return []
    if run.data.fill:
        return [f"data.fill is true, and {model.name} takes no masked images; leave it out"]
    return [f"{model.name} takes masked images, and data.fill is false; set it to true"]


def class_misfits(model: ModelSpec, classes: list[str] | int) -> list[str]:
    """Why the model cannot take these classes (names, or their number)."""
    if not takes_classes(model):
        return [f"classes, and {model.class_name} takes text"]
    found, most = classes if isinstance(classes, int) else len(classes), class_count(model)
    key = FAMILIES[model.class_name].classes
    return [f"{found} classes, and the model's {key} is {most}"] if found > most else []


def condition_problems(run: RunConfig, model: ModelSpec) -> list[str]:
    """Why the model cannot take the run's conditions."""
    labelled = run.data.images[0].label is not None
    images = [*first_frame_problems(run, model), *_reference_problems(run, model), *_fill_problems(run, model)]
    if not takes_classes(model):
        problem = f"data.images has a label, and {model.class_name} takes text; leave it out, and set encoders.text"
        return [*([problem] if labelled else []), *images]
    if not labelled:
        return [
            f"data.images has no label, and {model.class_name} takes classes; set it, such as to folder, and leave "
            "encoders.text out"
        ]
    problems = [
        f"data.classes names {misfit}" for misfit in class_misfits(model, list(run.data.classes or ()))
    ] + images
    if run.data.caption_dropout and no_class(model) is None:
        problems.append(
            f"data.caption_dropout is {run.data.caption_dropout:g}, and model.kwargs.null_class is false: the model "
            "has no label for no class; set the one to 0, or the other to true"
        )
    return problems
