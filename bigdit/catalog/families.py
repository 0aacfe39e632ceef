"""The diffusers classes with an adapter in bigdit.models, and the inputs of each, without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from bigdit.catalog.names import load_json, refusal
from bigdit.errors import nearest
from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec, ObjectiveSpec
from bigdit.strategy import ModelSpec, Strict


class Stream(Strict):
    """A further text input of a family. `tokens`: their number, or the constructor argument for it. `layers`: the
    argument that lists encoder layers, each with states of its own. `dim`: the argument with the width of the states,
    the last of a list. `optional`: without that argument the model has no such text."""

    dim: str
    tokens: str | int
    layers: str | None = None
    optional: bool = False


class Inputs(Strict):
    """The inputs of a family, other than latents and t, from `families.json`.

    `pipeline`: the diffusers pipeline with its VAE and text encoders.

    Text: `text_dim`, `text_tokens` and `text_layers` are constructor arguments: the width of the embeddings (the first
    of a list; None without text), their fixed number, and the number of layers in them. `joined`: layers of the text
    encoder in one width. `pooled_dim`: the argument for the pooled vector. `by_text`: padding of captions is cut off.
    `extras`: further inputs, by the adapter's names; `streams`: further texts, each with a mask, `…_mask`.

    Images: `classes`: the argument with the number of classes. `packs`: 2 × 2 latents are packed into channels.
    `references`: the most images that a sample can be an edit of. `fill`: models with still more channels take a masked
    image and its mask. `controlnet`: diffusers' ControlNet class. `square`: height and width are one number; `fixed`:
    `sample_size` is that number.

    Videos: `video`: latents have frames. `first_frame`: models that take a first frame can be trained; `blank`: every
    model takes one or none; `keeps_first`: also models without channels for it take one, as the first latents at t = 0.
    `image_dim`: the argument for the width of an image encoder's `image_tokens` embeddings of it.

    Blocks: `depths`: the lists of equal blocks in the order of the forward pass, with the arguments for their lengths.
    `even`: the number is even, and skips join the halves. `routed`: tokens go to experts, so memory varies with values.
    `objective`: the default. `source`: that of the figures.
    """

    pipeline: str | None = None
    text_dim: str | None = None
    text_tokens: str | None = None
    text_layers: str | None = None
    joined: int = 1
    pooled_dim: str = "pooled_projection_dim"
    extras: tuple[str, ...] = ()
    streams: dict[str, Stream] = {}
    classes: str | None = None
    packs: bool = False
    video: bool = False
    first_frame: bool = False
    blank: bool = False
    keeps_first: bool = False
    image_dim: str | None = None
    image_tokens: int = 0
    references: int = 0
    fill: bool = False
    controlnet: str | None = None
    square: bool = False
    fixed: bool = False
    depths: dict[str, str] = {"transformer_blocks": "num_layers"}
    even: bool = False
    routed: bool = False
    by_text: bool = False
    objective: Annotated[FlowMatchingSpec | DdpmSpec, Field(discriminator="name")] = FlowMatchingSpec()
    source: str | None = None


PACKING = 2
"""Latents per side that are packed into one, outside of a model that `packs`."""
REFERENCE = "reference"
"""An extra of a batch, [B, references, C, H, W]: the latents of the images that a sample is an edit of."""
IMAGE_CONDITION = "image_condition"
"""An extra of a batch: a mask, 1 where a latent frame is given, and the latents of the first frame."""
IMAGE_EMBEDS = "image_embeds"
"""An extra: an image encoder's embeddings of that frame."""
IMAGE_ENCODER = "image_encoder"
"""The image encoder in a pipeline's folder."""
FILL = "fill"
"""An extra: the latents of an image whose masked part is gray, then the mask: a channel for each pixel of a latent."""
LOSS_MASK = "loss_mask"
"""An extra: the weight of the loss at each place of the latents [B, H, W]."""
CLASS_LABEL = "class_label"
"""The name of class labels among a batch's extras."""
CONTROLNET = "controlnet"
"""The name of a ControlNet in its model, and in an export."""


def mask_of(stream: str) -> str:
    """The name of the mask of a further text among a batch's extras."""
    return f"{stream}_mask"


def stream_shapes(class_name: str, arguments: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(most states, width) of each further text whose arguments are known."""
    streams = FAMILIES[class_name].streams if class_name in FAMILIES else {}
    shapes = {name: (_tokens(each, arguments), _last(arguments.get(each.dim))) for name, each in streams.items()}
    return {name: (tokens, dim) for name, (tokens, dim) in shapes.items() if tokens is not None and dim is not None}


def streams_of(spec: ModelSpec) -> tuple[str, ...]:
    """The names of a model's further texts."""
    streams = FAMILIES[spec.class_name].streams.items()
    return tuple(name for name, each in streams if not each.optional or spec.kwargs.get(each.dim) is not None)


def block_count(spec: ModelSpec) -> int | None:
    """The number of blocks by the arguments; None if an argument is missing."""
    depths = FAMILIES[spec.class_name].depths.values() if spec.class_name in FAMILIES else ()
    counts = [spec.kwargs.get(key) for key in depths]
    return sum(each for each in counts if each) if counts and all(type(each) is int for each in counts) else None


def _tokens(stream: Stream, arguments: Mapping[str, Any]) -> int | None:
    tokens = arguments.get(stream.tokens) if isinstance(stream.tokens, str) else stream.tokens
    layers = [0] if stream.layers is None else arguments.get(stream.layers)
    if not isinstance(tokens, int) or not isinstance(layers, list | tuple) or not layers:
        return None
    return (max(layers) + 1) * tokens if all(isinstance(each, int) for each in layers) else None


def _last(value: Any) -> int | None:
    found = value[-1] if isinstance(value, list | tuple) and value else value
    return found if isinstance(found, int) else None


_STYLED = "use_style_cond_and_image_meta_size"  # true where a model does not say

_LISTED = load_json("families.json")

FAMILIES: dict[str, Inputs] = {name: Inputs.model_validate(each) for name, each in _LISTED["families"].items()}

PIPELINES = {name: each.pipeline for name, each in FAMILIES.items() if each.pipeline is not None}
"""The diffusers pipeline with the VAE and the text encoders of a class."""


class Editor(Strict):
    """How a pipeline edits. `references`: the most images that a sample is an edit of. `area`: the pixels that each is
    resized to; None: the size of the edit. `seen`: the pixels of each that the text encoder reads; None: captions
    only."""

    references: int = 1
    area: int | None = None
    seen: int | None = None

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The pixels (height, width) of a reference of an edit of this size."""
        return (height, width) if self.area is None else resized(self.area, height, width)

    def latents(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """The shape of a reference's latents, for those of an edit (C, h, w)."""
        height, width = self.resized(*(side * EDITED for side in shape[-2:]))
        return shape[0], height // EDITED, width // EDITED


EDITED = 8
"""Pixels per side of a latent, for pipelines that resize references."""
MOST_ASPECT = 4
"""The largest ratio of the sides of an edit for which the tokens of a reference are counted."""


def resized(area: int, height: float, width: float) -> tuple[int, int]:
    """(height, width) of about `area` pixels in the ratio of these, each a multiple of 32.

    Source: diffusers 0.42.1, calculate_dimensions of QwenImageEditPipeline and QwenImageEditPlusPipeline.
    """
    wide = math.sqrt(area * (width / height))
    return round(wide / (width / height) / 32) * 32, round(wide / 32) * 32


EDITORS = {
    "FluxControlPipeline": Editor(),
    "FluxKontextPipeline": Editor(),
    "QwenImageEditPipeline": Editor(area=1024**2, seen=1024**2),
    "QwenImageEditPlusPipeline": Editor(references=3, area=1024**2, seen=384**2),
}
"""The pipelines that edit images. Source: their __call__ in diffusers 0.42.1."""
ALONE = Editor(references=0)
"""Other pipelines: a reference is as large as its edit, and the text encoder does not read it."""


def editor_of(pipeline: Any) -> Editor:
    """How this pipeline edits; the class name may be any value of a document."""
    return EDITORS.get(str(pipeline), ALONE)


_BY_WIDTH = {
    ("Flux2Transformer2DModel", 7680): "Flux2KleinPipeline",
    ("Flux2Transformer2DModel", 12288): "Flux2KleinPipeline",
    ("Flux2Transformer2DModel", 15360): "Flux2Pipeline",
}
"""Pipelines of classes whose models have different text encoders, by the width of the text."""


def pipeline_of(class_name: str, text_dim: int | None) -> str | None:
    """The diffusers pipeline that encodes the text of a model; None where bigdit cannot encode it."""
    return PIPELINES.get(class_name) or _BY_WIDTH.get((class_name, text_dim or 0))


PUBLISHED: dict[str, FlowMatchingSpec | DdpmSpec] = {
    name: Inputs(objective=each["objective"]).objective
    for each in _LISTED["published"]
    for name in each["models"].split()
}
"""Objectives of published models that differ from their family's."""


def family_objective(model: ModelSpec) -> FlowMatchingSpec | DdpmSpec:
    """The objective of the class."""
    found = FAMILIES.get(model.class_name, Inputs()).objective
    styled = model.class_name == "HunyuanDiT2DModel" and model.kwargs.get(_STYLED, True)
    return found.model_copy(update={"beta_end": 0.03}) if styled else found


def objective_of(model: ModelSpec, asked: ObjectiveSpec | None) -> ObjectiveSpec:
    """The objective of a model: as asked, else as published, else its family's."""
    return asked or PUBLISHED.get(model.name) or family_objective(model)


MOST_BLOCKS = 1000
"""The most blocks in a list; the deepest model of the catalogue has 60."""
LARGEST_ARGUMENT = 2**24
"""The largest width, count or length; in the catalogue the largest is a width of 14336."""
WIDEST = 2**20
"""The most channels of all heads of attention."""
_DEPTHS = re.compile("layers|depth|blocks")
"""Matches names of arguments for the number of modules."""
_NO_SIZE = re.compile("theta")
"""Matches names of arguments that are no sizes: rope_theta is up to 1e9."""


def too_large(arguments: Mapping[str, Any]) -> list[str]:
    """A line for each size that is too large to build a model, also within lists and mappings."""
    problems, waiting = [], list(arguments.items())
    while waiting:
        key, value = waiting.pop()
        most = MOST_BLOCKS if _DEPTHS.search(key) else LARGEST_ARGUMENT
        if isinstance(value, Mapping):
            waiting += [(f"{key}.{inner}", each) for inner, each in value.items()]
        elif isinstance(value, list | tuple) and len(value) > MOST_BLOCKS:
            problems.append(f"{key} has {len(value)} values, and {MOST_BLOCKS} are the most")
        elif isinstance(value, list | tuple):
            waiting += [(f"{key}[{place}]", each) for place, each in enumerate(value)]
        elif isinstance(value, int) and value > most and not _NO_SIZE.search(key):
            problems.append(f"{key} is {value}, and 0 to {most} was expected")
    return problems


def argument_problems(spec: ModelSpec) -> list[str]:
    """Problems of arguments that no class takes: negative or too large sizes, and no block at all."""
    depths = tuple(dict.fromkeys(FAMILIES.get(spec.class_name, Inputs()).depths.values()))
    problems = [
        f"model.kwargs.{key} is {value}, and 0 to {MOST_BLOCKS if key in depths else LARGEST_ARGUMENT} was expected"
        for key, value in spec.kwargs.items()
        if isinstance(value, int) and value < 0
    ]
    problems += [f"model.kwargs.{problem}" for problem in too_large(spec.kwargs)]
    heads, channels = (spec.kwargs.get(key) for key in ("num_attention_heads", "attention_head_dim"))
    if isinstance(heads, int) and isinstance(channels, int) and heads * channels > WIDEST:
        width = f"model.kwargs.num_attention_heads is {heads} and attention_head_dim {channels}: a width of"
        problems.append(f"{width} {heads * channels}, and {WIDEST} is the most")
    problems += [
        f"model.kwargs.{key} is {value}, and a finite number was expected"
        for key, value in spec.kwargs.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    if depths and all(spec.kwargs.get(key) == 0 for key in depths):
        none = " and ".join(f"model.kwargs.{key} is 0" for key in depths)
        problems.append(f"{none}, and a model without a block learns nothing; set it to 1 or more")
    return problems


def training_obstacle(spec: ModelSpec) -> str | None:
    """Why a model cannot be trained on a cache of latents and texts or classes; None if it can."""
    class_name = spec.class_name
    inputs = FAMILIES.get(class_name)
    if inputs is None:
        return no_adapter(class_name)
    if not inputs.blank and begins_with_an_image(spec):
        if not inputs.first_frame:
            return f"{spec.name} begins with an image, which the adapter of {class_name} does not take"
        if spec.kwargs.get("pos_embed_seq_len") is not None:
            return f"{spec.name} needs the first and the last frame, and a cache keeps only the first"
    return None


def no_adapter(class_name: str) -> str:
    """The error for a class without an adapter, with the reason or similar names."""
    near = nearest(class_name, FAMILIES)
    why = refusal("model", class_name) or (f"; {near}" if near.startswith("did you mean") else "")
    return f"the class {class_name} is not known{why}"


def is_controlled(spec: ModelSpec) -> bool:
    """Whether an image model takes one reference as further channels, as many as its latents have."""
    channels, out = (spec.kwargs.get(key) for key in ("in_channels", "out_channels"))
    takes = spec.class_name in FAMILIES and FAMILIES[spec.class_name].references > 0
    return takes and isinstance(channels, int) and isinstance(out, int) and channels == 2 * out


def fills(spec: ModelSpec) -> bool:
    """Whether an image model takes a masked image and its mask as further channels, more than its latents have."""
    channels, out = (spec.kwargs.get(key) for key in ("in_channels", "out_channels"))
    takes = spec.class_name in FAMILIES and FAMILIES[spec.class_name].fill
    return takes and isinstance(channels, int) and isinstance(out, int) and channels > 2 * out


def begins_with_an_image(spec: ModelSpec) -> bool:
    """Whether a video model takes its first frame, as further channels or in its blocks."""
    channels, out = (spec.kwargs.get(key) for key in ("in_channels", "out_channels"))
    wider = isinstance(channels, int) and isinstance(out, int) and channels > out
    given = wider or any(spec.kwargs.get(key) is not None for key in ("image_dim", "image_condition_type"))
    return given and spec.class_name in FAMILIES and FAMILIES[spec.class_name].video


def takes_first_frame(model: ModelSpec) -> bool:
    """Whether the model always needs the first frame of its videos."""
    return begins_with_an_image(model) and FAMILIES[model.class_name].first_frame


def can_take_first_frame(model: ModelSpec) -> bool:
    """Whether the model can take the first frame of its videos."""
    inputs = FAMILIES.get(model.class_name, Inputs())
    return takes_first_frame(model) or inputs.blank or (inputs.keeps_first and not begins_with_an_image(model))


def embeds_first_frame(model: ModelSpec) -> bool:
    """Whether the model takes an image encoder's embeddings of the first frame."""
    inputs = FAMILIES[model.class_name]
    return inputs.image_dim is not None and (inputs.blank or model.kwargs.get(inputs.image_dim) is not None)


def takes_more_channels(model: ModelSpec) -> bool:
    """Whether the model's input has more channels than latents: for a reference, a masked image or a first frame."""
    blank = model.class_name in FAMILIES and FAMILIES[model.class_name].blank
    return blank or takes_first_frame(model) or is_controlled(model) or fills(model)


def fill_channels(channels: int, downsample: int) -> int:
    """The channels of a masked image and its mask. `channels`: of latents; `downsample`: their pixels per side."""
    return channels + downsample**2


DEFAULT_CLASSES = 1000
"""The classes of ImageNet, the default of DiT and PaperDiT."""


def takes_classes(model: ModelSpec) -> bool:
    """Whether the model takes a class instead of text."""
    return model.class_name in FAMILIES and CLASS_LABEL in FAMILIES[model.class_name].extras


def class_count(model: ModelSpec) -> int:
    """The number of classes of a model that takes them."""
    known = model.kwargs.get(FAMILIES[model.class_name].classes or "")
    return known if isinstance(known, int) else DEFAULT_CLASSES


def no_class(model: ModelSpec) -> int | None:
    """The label for no class, which follows the last class; None if a model has none."""
    return class_count(model) if takes_classes(model) and model.kwargs.get("null_class", True) else None
