"""Whether a store, the run's model and encoders, and its plan go together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bigdit.catalog import FAMILIES
from bigdit.catalog.conditions import IMAGE_ENCODER, fed_more
from bigdit.catalog.families import stream_shapes, streams_of
from bigdit.config.data import IdentityCodec, TextEncoderConfig, VaeCodec, written_bucket
from bigdit.config.plan_file import PlanFile
from bigdit.config.run import RunConfig
from bigdit.documents import read_json
from bigdit.encoders.folder import weights_sample
from bigdit.encoders.recipes import RECIPES
from bigdit.store.part import Shape, shape_name
from bigdit.store.schema import StoreSchema
from bigdit.store.tensors import config_digest
from bigdit.store.text import TEXT
from bigdit.strategy import ModelSpec


def latent_misfits(model: ModelSpec, channels: int) -> list[str]:
    """What keeps the model from latents of so many channels; arguments left at the class's defaults are not judged."""
    packs = model.class_name in FAMILIES and FAMILIES[model.class_name].packs
    given, how = (4 * channels, " in patches of 2 × 2") if packs else (channels, "")
    key = "out_channels" if fed_more(model) else "in_channels"
    taken = model.kwargs.get(key)
    return [] if taken in (None, given) else [f"{given} channels{how}, and the model's {key} is {taken}"]


def size_misfits(model: ModelSpec, shapes: Iterable[Shape]) -> list[str]:
    """What keeps the model from latents of these shapes."""
    family = FAMILIES.get(model.class_name)
    if family is None:
        return []
    if family.video:
        return [f"latents of {shape_name(shape)}{misfit}" for shape in shapes for misfit in _video_misfit(model, shape)]
    moving = [f"latents of {shape_name(shape)}, with frames" for shape in shapes if len(shape) == 4]
    if moving or not family.square:
        return [f"{each}, and {model.class_name} makes pictures" for each in moving]
    side = model.kwargs.get("sample_size") if family.fixed else None
    takes = "squares alone" if side is None else f"{side} × {side} alone (its sample_size)"
    return [
        f"latents of {shape_name(shape)}, and {model.class_name} takes {takes}"
        for shape in shapes
        if shape[-1] != shape[-2] or side not in (None, shape[-1])
    ]


def _video_misfit(model: ModelSpec, shape: Shape) -> list[str]:
    """What keeps a model of videos from latents of a shape."""
    if len(shape) == 3:
        return [f" without frames, and {model.class_name} makes videos: give [frames, height, width]"]
    patch = model.kwargs.get("patch_size")
    *_, side = patch if isinstance(patch, list | tuple) else [patch]
    deep = patch[0] if isinstance(patch, list | tuple) else model.kwargs.get("patch_size_t")
    return [
        f" with {length} {what}, and the model's patches are of {size}; nearest: {-(-length // size) * size}"
        for what, length, size in (("frames", shape[1], deep), ("rows", shape[2], side), ("columns", shape[3], side))
        if isinstance(size, int) and length % size
    ]


def text_misfits(model: ModelSpec, shapes: Mapping[str, tuple[int, int]], pooled_dim: int | None) -> list[str]:
    """What keeps the model from texts of these [max_tokens, dim], as FeatureStore.text_shapes has them, and from a
    pooled vector of `pooled_dim`, None without."""
    family = FAMILIES.get(model.class_name)
    if family is None:
        return []
    problems = []
    tokens, dim = shapes[TEXT]
    width = model.kwargs.get(family.text_dim or "")
    width = width[0] if isinstance(width, list) and width else width
    if isinstance(width, int) and width != dim and family.text_layers is None:
        problems.append(f"{dim} features, and the model's {family.text_dim} is {width}")
    most = model.kwargs.get(family.text_tokens or "")
    if isinstance(most, int) and most != tokens:
        problems.append(f"{tokens} states, and the model's {family.text_tokens} is {most}")
    if "pooled_text" in family.extras:
        vector = model.kwargs.get(family.pooled_dim)
        if pooled_dim is None:
            problems.append(f"no pooled vector, and {model.class_name} is fed one")
        elif vector not in (None, pooled_dim):
            problems.append(f"{pooled_dim} pooled features, and the model's {family.pooled_dim} is {vector}")
    return problems + _stream_misfits(model, {name: each for name, each in shapes.items() if name != TEXT})


def _stream_misfits(model: ModelSpec, found: Mapping[str, tuple[int, int]]) -> list[str]:
    """What keeps the model from further texts of these [max_tokens, dim]."""
    wanted = stream_shapes(model.class_name, model.kwargs)
    known = streams_of(model)
    problems = [f"no {name} beside it, which {model.class_name} is fed" for name in known if name not in found]
    problems += [f"{name} beside it, which {model.class_name} is not fed" for name in found if name not in known]
    return problems + [
        f"{name} of {_by(found[name])}, and {model.class_name} is fed {_by(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]


def _by(shape: tuple[int, int]) -> str:
    return f"{shape[0]} × {shape[1]}"


def run_misfits(run: RunConfig, schema: StoreSchema) -> list[str]:
    """How the store was encoded otherwise than the run says, as far as configs and a sample of the weights show.

    `bigdit extract` reads all weights, and tokenizers too.
    """
    image, text = run.encoders.image, run.encoders.text
    sections = [("encoders.image", _codec(image), schema.codec)]
    if text is not None:
        sections.append(("encoders.text", _text(text), schema.text_encoder))
    if (first := run.encoders.first_frame) is not None and first.pipeline is not None:
        seen = {"dtype": first.dtype} | _saved(first.pipeline / IMAGE_ENCODER, first.dtype)
        sections.append(("encoders.first_frame", seen, schema.first_frame or {}))
    if text is not None and text.pipeline is not None:
        sections += [
            (f"encoders.text.pipeline, in {name},", _saved(text.pipeline / name, text.dtype), found)
            for name, found in schema.text_encoder.get("components", {}).items()
        ]
    problems = [
        f"it was encoded with {key} {found[key]}, and {section} has {key} {value}"
        for section, asked, found in sections
        for key, value in asked.items()
        if found.get(key) not in (None, value)
    ]
    if run.data.classes is not None and schema.classes != list(run.data.classes):
        problems.append("it was encoded with other classes, or in another order, than data.classes names")
    if run.data.fps != schema.fps:
        problems.append(f"it was encoded with data.fps {schema.fps}, and the run has {run.data.fps}")
    if set(run.data.buckets) != set(schema.buckets):
        there, asked = (", ".join(map(written_bucket, sizes)) for sizes in (schema.buckets, run.data.buckets))
        problems.append(
            f"it was encoded in the buckets {there}, and data.buckets is {asked}; set data.buckets to "
            f"{[list(size) for size in schema.buckets]}, or name another folder in data.features and extract again"
        )
    return problems


def plan_misfits(plan: PlanFile, buckets: Iterable[Shape], max_tokens: int) -> list[str]:
    """What of a store's samples takes more than the plan's: latents larger than at the sizes that it found to fit its
    micro-batch, and longer text."""
    planned, (height, width) = plan.batch.latents, plan.question.resolution
    most = math.prod(planned) * plan.most_pixels // (height * width)
    problems = [
        f"its bucket {shape_name(shape)} is {math.prod(shape) / most:.1f} times the largest that the plan is for "
        f"(batch.latents {shape_name(planned)}, for {height} × {width}); ask `bigdit plan` for the size of this bucket"
        for shape in buckets
        if math.prod(shape) > most
    ]
    tokens = plan.batch.text and plan.batch.text[0]
    if tokens and max_tokens > tokens:
        problems.append(f"its text has up to {max_tokens} tokens, and the plan is for {tokens} (batch.text)")
    return problems


def smaller_than_planned(plan: PlanFile, buckets: Iterable[Shape]) -> list[str]:
    """What a person should know of a store whose samples are all smaller than the plan's."""
    planned, largest = plan.batch.latents, max(buckets, key=math.prod)
    if math.prod(largest) >= math.prod(planned):
        return []
    return [
        f"the largest bucket of data.features is {shape_name(largest)}, and the plan is for {shape_name(planned)} "
        "(batch.latents): steps take less memory and time than it says, and a larger micro-batch may fit"
    ]


def _codec(config: IdentityCodec | VaeCodec) -> dict[str, Any]:
    """What of a codec's identity the config says."""
    if isinstance(config, IdentityCodec):
        return config.model_dump()
    said = config.model_dump(include={"name", "class_name", "latents", "dtype"})
    seed = {"seed": config.seed} if config.latents == "sampled" else {}
    seed |= {"tiling": True} if config.tiling else {}
    return said | seed | _saved(config.path, config.dtype)


def _text(config: TextEncoderConfig) -> dict[str, Any]:
    """What of a text encoder's identity the config says."""
    said: dict[str, Any] = {"dtype": config.dtype, "stored": config.stored}
    if config.pipeline is None:
        said["class_name"] = config.class_name
        if config.path is not None:
            return said | _saved(config.path, config.dtype)
        return said | {"config": config_digest(config.config or {}), "seed": config.seed}
    index = _document(config.pipeline / "model_index.json")
    name = index.get("_class_name")
    recipe = RECIPES.get(name) if isinstance(name, str) else None
    return ({"class_name": name} if "_class_name" in index else {}) | (recipe.said(index) if recipe else {}) | said


def _saved(folder: Path, dtype: str) -> dict[str, Any]:
    """What tells the model in a folder from others; nothing where the machine that trains has no encoders."""
    config, sample = _document(folder / "config.json"), weights_sample(folder, dtype)
    return ({"config": config_digest(config)} if config else {}) | ({"weights_sample": sample} if sample else {})


def _document(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
