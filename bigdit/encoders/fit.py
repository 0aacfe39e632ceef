"""Checks that a store, and the model, encoders and plan of a run, fit together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bigdit.catalog import FAMILIES
from bigdit.catalog.conditions import class_misfits, fill_misfits, first_frame_misfits, reference_misfits
from bigdit.catalog.families import (
    EDITED,
    IMAGE_ENCODER,
    MOST_ASPECT,
    editor_of,
    stream_shapes,
    streams_of,
    takes_more_channels,
)
from bigdit.config.data import DataConfig, IdentityCodec, TextEncoderConfig, VaeCodec, written_bucket
from bigdit.config.plan_file import PlanFile
from bigdit.config.run import RunConfig
from bigdit.documents import read_json
from bigdit.encoders.folder import weights_sample
from bigdit.encoders.protocol import ImageCodec, TextEncoder, shapes_of
from bigdit.encoders.recipes import RECIPES
from bigdit.errors import UserError
from bigdit.store import FeatureStore
from bigdit.store.part import Shape, shape_name
from bigdit.store.schema import StoreSchema
from bigdit.store.tensors import config_digest
from bigdit.store.text import TEXT
from bigdit.strategy import ModelSpec


def encoder_misfits(
    run: RunConfig,
    model: ModelSpec,
    codec: ImageCodec,
    text: TextEncoder | None,
    classes: list[str] | int | None,
    first_frame: dict[str, Any] | None = None,
    fill: int = 0,
) -> list[str]:
    """Why the run's encoders cannot encode its buckets, or the model cannot take their features.

    `classes`, `first_frame` and `fill` are as in StoreSchema.
    """
    shapes, problems = _latent_shapes(run.data, codec)
    problems += [f"encoders.image gives {each}" for each in latent_misfits(model, codec.channels)]
    if text is None:
        problems += [f"data.images has {each}" for each in class_misfits(model, classes or [])]
    else:
        problems += [f"encoders.text gives {each}" for each in text_misfits(model, shapes_of(text), text.pooled_dim)]
    tokens = None if text is None else text.max_tokens
    problems += [f"encoders gives {each}" for each in first_frame_misfits(model, codec.channels, first_frame, tokens)]
    problems += [f"encoders.image gives {each}" for each in fill_misfits(model, fill)]
    problems += _editor_misfits(run, codec, text)
    return problems + [f"data.buckets gives {each}" for each in size_misfits(model, shapes)]


def _latent_shapes(data: DataConfig, codec: ImageCodec) -> tuple[list[Shape], list[str]]:
    """The shapes of latents of the buckets, and why the codec cannot encode some buckets."""
    shapes: list[Shape] = []
    problems: list[str] = []
    for key, buckets in data.keyed_buckets.items():
        for bucket in buckets:
            try:
                shapes.append(codec.latent_shape(bucket))
            except UserError as error:
                problems += [each.replace("data.buckets", key, 1) for each in error.problems]
    return shapes, problems


def _editor_misfits(run: RunConfig, codec: ImageCodec, text: TextEncoder | None) -> list[str]:
    """Why the pipeline that encodes captions cannot edit images of these buckets."""
    named = None if text is None or not run.data.references else text.identity.get("class_name")
    if editor_of(named).area is None:
        return []
    if run.strategy.controlnet is not None:
        return [
            f"the text encoder of {named} reads the images to edit, and those of a ControlNet are none; take its base"
        ]
    if 0 in run.data.reference_counts:
        return [f"data.min_references is 0, and the text encoder of {named} reads the images to edit; set it to 1"]
    if codec.downsample != EDITED:
        return [f"encoders.image has {codec.downsample} pixels a side of a latent, and {named} takes {EDITED}"]
    long = [each for each in run.data.all_buckets if max(each[-2:]) > MOST_ASPECT * min(each[-2:])]
    return [
        f"data.buckets has {written_bucket(each)}; with {named} a side is at most {MOST_ASPECT} times the other"
        for each in long
    ]


def store_misfits(run: RunConfig, model: ModelSpec, plan: PlanFile | None, store: FeatureStore) -> list[str]:
    """Why the features of a store do not fit the model, the run or its plan."""
    tokens = 0 if store.text_shape is None else store.text_shape[0]
    return [
        *(f"its latents have {misfit}" for misfit in latent_misfits(model, next(iter(store.buckets))[0])),
        *(f"it has {misfit}" for misfit in size_misfits(model, store.buckets)),
        *_condition_misfits(run, model, store),
        *_frame_misfits(run, model, store),
        *run_misfits(run, store.schema),
        *(plan_misfits(plan, store.buckets, tokens) if plan is not None else ()),
    ]


def _condition_misfits(run: RunConfig, model: ModelSpec, store: FeatureStore) -> list[str]:
    """Why the store's text or classes do not fit the model or the run."""
    schema, text = store.schema, run.encoders.text
    if schema.classes is not None:
        return [f"it has {misfit}" for misfit in class_misfits(model, schema.classes)]
    if text is None:
        return [f"it has captions, and {model.class_name} is conditioned on classes"]
    null, max_tokens = store.null_text, text.tokens_asked
    pooled_dim = None if null.pooled is None else len(null.pooled)
    problems = [f"its text has {misfit}" for misfit in text_misfits(model, store.text_shapes, pooled_dim)]
    most = schema.text_encoder.get("max_sequence_length") or schema.text_encoder["max_tokens"]
    if max_tokens not in (None, most):
        problems.append(f"its text has at most {most} tokens, and encoders.text.max_tokens is {max_tokens}")
    return problems


def _frame_misfits(run: RunConfig, model: ModelSpec, store: FeatureStore) -> list[str]:
    """Why the store's first frames, references or masked images do not fit the model."""
    channels, text = next(iter(store.buckets))[0], store.text_shape
    found = first_frame_misfits(model, channels, store.schema.first_frame, None if text is None else text[0])
    found += [] if run.strategy.controlnet else reference_misfits(model, store.schema.references)
    found += fill_misfits(model, store.schema.fill)
    return [f"it has {misfit}" for misfit in found]


def latent_misfits(model: ModelSpec, channels: int) -> list[str]:
    """Why the model cannot take latents with so many channels. Arguments with default values are not checked."""
    packs = model.class_name in FAMILIES and FAMILIES[model.class_name].packs
    given, how = (4 * channels, " in patches of 2 × 2") if packs else (channels, "")
    key = "out_channels" if takes_more_channels(model) else "in_channels"
    taken = model.kwargs.get(key)
    return [] if taken in (None, given) else [f"{given} channels{how}, and the model's {key} is {taken}"]


def size_misfits(model: ModelSpec, shapes: Iterable[Shape]) -> list[str]:
    """Why the model cannot take latents of these shapes."""
    family = FAMILIES.get(model.class_name)
    if family is None:
        return []
    if family.video:
        return [f"latents of {shape_name(shape)}{misfit}" for shape in shapes for misfit in _video_misfit(model, shape)]
    shapes = list(shapes)
    moving = [f"latents of {shape_name(shape)}, with frames" for shape in shapes if len(shape) == 4]
    if moving:
        return [f"{each}, and {model.class_name} generates images" for each in moving]
    if not family.square:
        return _beyond_positions(model, shapes)
    side = model.kwargs.get("sample_size") if family.fixed else None
    takes = "only squares" if side is None else f"only {side} × {side} (its sample_size)"
    return [
        f"latents of {shape_name(shape)}, and {model.class_name} takes {takes}"
        for shape in shapes
        if shape[-1] != shape[-2] or side not in (None, shape[-1])
    ]


def _beyond_positions(model: ModelSpec, shapes: Iterable[Shape]) -> list[str]:
    """Why the model cannot take latents: they have more patches on a side than the model has positions."""
    most, patch = model.kwargs.get("pos_embed_max_size"), model.kwargs.get("patch_size")
    sided = model.class_name in ("SD3Transformer2DModel", "CogView3PlusTransformer2DModel")  # AuraFlow's is of an area
    if not (sided and isinstance(most, int) and isinstance(patch, int)):
        return []
    return [
        f"latents of {shape_name(shape)}, and {model.class_name} takes up to {most * patch} on a side "
        f"(its pos_embed_max_size × patch_size); use a smaller size"
        for shape in shapes
        if max(shape[-2:]) // patch > most
    ]


def _video_misfit(model: ModelSpec, shape: Shape) -> list[str]:
    """Why a video model cannot take latents of a shape."""
    if len(shape) == 3:
        return [f" without frames, and {model.class_name} generates videos; set [frames, height, width]"]
    if model.kwargs.get("use_learned_positional_embeddings"):  # CogVideoX-5B's, from an image
        frames = (model.kwargs.get("sample_frames", 49) - 1) // model.kwargs.get("temporal_compression_ratio", 4) + 1
        sizes = (frames, model.kwargs.get("sample_height", 60), model.kwargs.get("sample_width", 90))
        if shape[1:] != sizes:
            return [f", and the model has learned positions of {' × '.join(map(str, sizes))} latents"]
    patch = model.kwargs.get("patch_size")
    *_, side = patch if isinstance(patch, list | tuple) else [patch]
    deep = patch[0] if isinstance(patch, list | tuple) else model.kwargs.get("patch_size_t")
    return [
        f" with {length} {what}, and the model's patch size is {size}; nearest: {-(-length // size) * size}"
        for what, length, size in (("frames", shape[1], deep), ("rows", shape[2], side), ("columns", shape[3], side))
        if isinstance(size, int) and length % size
    ]


def text_misfits(model: ModelSpec, shapes: Mapping[str, tuple[int, int]], pooled_dim: int | None) -> list[str]:
    """Why the model cannot take texts of these `shapes`, as FeatureStore.text_shapes, with a vector of `pooled_dim`."""
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
    """Why the model cannot take further texts of these [max_tokens, dim]."""
    known = streams_of(model)
    problems = [f"no {name}, which {model.class_name} needs" for name in known if name not in found]
    problems += [f"{name}, which {model.class_name} does not take" for name in found if name not in known]
    return problems + [
        f"{name} of {_by(found[name])}, and {model.class_name} takes {_by(shape)}"
        for name, shape in stream_shapes(model.class_name, model.kwargs).items()
        if name in found and found[name] != shape
    ]


def _by(shape: tuple[int, int]) -> str:
    return f"{shape[0]} × {shape[1]}"


def run_misfits(run: RunConfig, schema: StoreSchema) -> list[str]:
    """How the run's encoders and data differ from the store's. Compares configs and a sample of the weights.

    `bigdit extract` compares all weights and tokenizers.
    """
    image, text = run.encoders.image, run.encoders.text
    sections = [("encoders.image", _codec(image), schema.codec)]
    if text is not None:
        sections.append(("encoders.text", _text(text), schema.text_encoder))
    first = run.encoders.first_frame
    if first is not None and first.pipeline is not None:
        encoder = {"dtype": first.dtype} | _saved(first.pipeline / IMAGE_ENCODER, first.dtype)
        sections.append(("encoders.first_frame", encoder, schema.first_frame or {}))
    if text is not None and text.pipeline is not None:
        folder, of = text.pipeline, text.weights_of
        sections += [
            (f"encoders.text.pipeline, in {name},", _saved(of(name), text.dtype, folder / name), found)
            for name, found in schema.text_encoder.get("components", {}).items()
        ]
    problems = [
        f"it was encoded with {key} {found[key]}, and {section} has {key} {value}"
        for section, asked, found in sections
        for key, value in asked.items()
        if found.get(key) not in (None, value)
    ]
    if run.data.classes is not None and schema.classes != list(run.data.classes):
        problems.append("it was encoded with other classes than data.classes, or in another order")
    if (first is None) != (schema.first_frame is None):
        there, here = ("without", "set") if schema.first_frame is None else ("with", "not set")
        problems.append(f"it was encoded {there} first frames, and encoders.first_frame is {here}")
    for key in ("references", "min_references", "fill", "fps"):
        found, asked = getattr(schema, key), getattr(run.data, key)
        found = bool(found) if key == "fill" else found
        if found != asked:
            there, here = ("none" if each is None else str(each).lower() for each in (found, asked))
            problems.append(f"it was encoded with data.{key} {there}, and the run has {here}")
    return problems + list(dict.fromkeys(_bucket_misfits(run, schema)))


def _bucket_misfits(run: RunConfig, schema: StoreSchema) -> Iterator[str]:
    """Why the store does not fit: its sources have other buckets."""
    for number, (source, known) in enumerate(zip(run.data.images, schema.current, strict=False)):
        asked, found = source.buckets or run.data.buckets, list(map(tuple, known.get("buckets", schema.buckets)))
        if set(asked) != set(found):
            key = "data.buckets" if source.buckets is None else f"data.images[{number}].buckets"
            there, here = (", ".join(map(written_bucket, sizes)) for sizes in (found, asked))
            yield (
                f"it was encoded with the buckets {there}, and {key} is {here}; set {key} to "
                f"{[list(size) for size in found]}, or set another data.features and extract again"
            )


def plan_misfits(plan: PlanFile, buckets: Iterable[Shape], max_tokens: int) -> list[str]:
    """Why a store's latents or texts do not fit the plan: they are larger."""
    planned, (height, width) = plan.batch.latents, plan.request.resolution
    most = math.prod(planned) * plan.most_pixels // (height * width)
    problems = [
        f"its bucket {shape_name(shape)} is {math.prod(shape) / most:.1f} times the plan's largest "
        f"(batch.latents {shape_name(planned)}, for {height} × {width}); plan again for the size of this bucket"
        for shape in buckets
        if math.prod(shape) > most
    ]
    tokens = plan.batch.text and plan.batch.text[0]
    if tokens and max_tokens > tokens:
        problems.append(f"its text has up to {max_tokens} tokens, and the plan is for {tokens} (batch.text)")
    return problems


def smaller_than_planned(plan: PlanFile, buckets: Iterable[Shape]) -> list[str]:
    """A note if all samples of a store are smaller than the plan's."""
    planned, largest = plan.batch.latents, max(buckets, key=math.prod)
    if math.prod(largest) >= math.prod(planned):
        return []
    return [
        f"the largest bucket of data.features is {shape_name(largest)}, and the plan is for {shape_name(planned)} "
        "(batch.latents): steps take less memory and time than planned, and a larger micro-batch may fit"
    ]


def _codec(config: IdentityCodec | VaeCodec) -> dict[str, Any]:
    """The keys of a codec's identity that its config gives."""
    if isinstance(config, IdentityCodec):
        return config.model_dump()
    found = config.model_dump(include={"name", "class_name", "latents", "dtype"})
    found |= {"seed": config.seed} if config.latents == "sampled" else {}
    found |= {"tiling": True} if config.tiling else {}
    return found | _saved(config.path, config.dtype, config.described_in)


def _text(config: TextEncoderConfig) -> dict[str, Any]:
    """The keys of a text encoder's identity that its config gives."""
    found: dict[str, Any] = {"dtype": config.dtype, "stored": config.stored}
    if config.pipeline is None:
        found["class_name"] = config.class_name
        if config.path is not None:
            return found | _saved(config.path, config.dtype)
        return found | {"config": config_digest(config.config or {}), "seed": config.seed}
    index = _document(config.pipeline / "model_index.json")
    name = index.get("_class_name")
    recipe = RECIPES.get(name) if isinstance(name, str) else None
    return ({"class_name": name} if "_class_name" in index else {}) | (recipe.set_in(index) if recipe else {}) | found


def _saved(path: Path, dtype: str, described_in: Path | None = None) -> dict[str, Any]:
    """Digests of weights, and of their config, without those that are not on this machine."""
    config, sample = _document((described_in or path) / "config.json"), weights_sample(path, dtype)
    return ({"config": config_digest(config)} if config else {}) | ({"weights_sample": sample} if sample else {})


def _document(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
