"""Diffusion transformers: constructor arguments, verified parameter counts, and input shapes."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from bigdit.catalog.families import FAMILIES, editor_of, pipeline_of, training_obstacle
from bigdit.catalog.names import Aliases, aliases_of, load_json, normalise, resolve, suggestion
from bigdit.errors import UserError
from bigdit.strategy import BatchShape, ModelSpec, Strict


class TextInput(Strict):
    """The text embeddings of a model, (tokens, dim) per sample; None if unknown or varying.

    `reference_tokens`: the most further tokens for each image that a sample is an edit of."""

    encoder: str
    tokens: PositiveInt | None
    dim: PositiveInt | None
    notes: str | None
    reference_tokens: NonNegativeInt = 0


class Vae(Strict):
    """The autoencoder of a model's latents: pixels per latent in space and frames per latent in time."""

    name: str
    class_name: str
    kwargs: dict[str, Any] | None
    downsample: PositiveInt
    temporal_downsample: PositiveInt
    latent_channels: PositiveInt
    params: PositiveInt | None
    source: str
    notes: str | None


class PublishedClip(Strict):
    """The video size that a checkpoint was published for: pixels, frames, and frames per second."""

    height: PositiveInt
    width: PositiveInt
    frames: PositiveInt
    fps: PositiveInt
    source: str


class CatalogModel(Strict):
    """A diffusion transformer of the catalogue.

    `params`: their number of elements, None for a user's model. `block_lists`: lists of repeated blocks
    with their lengths, in the order of the forward pass. `patch_size`: in latents, with a packing outside the model.
    `patch_frames`: frames of latents in one token; they are padded to it. `resolution`: the published side in pixels;
    None if unknown, and for videos, which have a `clip`. `unverified`: what of the entry was not verified. `pipeline`:
    the diffusers folder of a user's own model, with VAE and text encoders. `folder`: that of the weights within it.
    `references`: the images that a sample is an edit of. `editor`: the pipeline that edits, if not that of the class.
    `first_frame`: whether videos begin with a given image, for models whose arguments do not say it.
    """

    spec: ModelSpec
    params: PositiveInt | None
    block_lists: tuple[tuple[str, PositiveInt], ...]
    text: TextInput | None
    vae: Vae
    patch_size: PositiveInt
    patch_frames: PositiveInt = 1
    resolution: PositiveInt | None
    video: bool
    clip: PublishedClip | None = None
    source: tuple[str, ...]
    unverified: str | None
    notes: str | None
    pipeline: str | None = None
    folder: str = "transformer"
    references: NonNegativeInt = 0
    editor: str | None = None
    first_frame: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def block_count(self) -> int:
        """All blocks that can be recomputed or swapped."""
        return sum(length for _, length in self.block_lists)

    @property
    def training_obstacle(self) -> str | None:
        """Why it cannot be trained on a cache of latents and text or classes; None if it can."""
        return training_obstacle(self.spec)

    @property
    def text_pipeline(self) -> str | None:
        """The diffusers pipeline that encodes its text; None without text, or if bigdit cannot encode it."""
        return None if self.text is None else self.editor or pipeline_of(self.spec.class_name, self.text.dim)

    @property
    def extractable(self) -> bool:
        """Whether `bigdit extract` can encode its training data."""
        return self.trainable and (self.text is None or self.text_pipeline is not None)

    @property
    def square(self) -> bool:
        """Whether it takes only squares."""
        inputs = FAMILIES.get(self.spec.class_name)
        return inputs is not None and inputs.square

    @property
    def trainable(self) -> bool:
        return self.training_obstacle is None


@cache
def _document() -> dict[str, Any]:
    return load_json("models.json")


@cache
def _model(name: str) -> CatalogModel:
    entry = dict(_document()["models"][name])
    vae = entry.pop("vae")
    return CatalogModel(
        spec=ModelSpec(name=name, class_name=entry.pop("class_name"), kwargs=entry.pop("kwargs")),
        vae=Vae(name=vae, **_document()["vaes"][vae]),
        **entry,
    )


def models() -> list[CatalogModel]:
    """All models, in the order of the catalogue: by family, then by size."""
    return [_model(name) for name in _document()["models"]]


def model(name: str) -> CatalogModel:
    """The model of that name, alias or repository of the hub. Raises UserError for an unknown or ambiguous name."""
    return _model(resolve("model", name, normalise(name), _document()["models"], _aliases()))


def no_model(name: str) -> str:
    """The end of an error for an unknown model: the reason, if known, and the nearest names."""
    return suggestion("model", normalise(name), _document()["models"], _aliases())


def model_aliases(name: str) -> tuple[str, ...]:
    """Other names of this model alone, without its repositories on the hub."""
    return aliases_of(name, _document()["aliases"])


def repositories(name: str) -> tuple[str, ...]:
    """The hub's repositories with this model's weights, as `owner/name`."""
    return tuple(repository for repository, held in _held().items() if name in held)


def _held() -> dict[str, list[str]]:
    """The models in each repository of the hub."""
    hub: dict[str, str | list[str]] = _document()["hub"]
    return {repository: [held] if isinstance(held, str) else held for repository, held in hub.items()}


@cache
def _aliases() -> Aliases:
    """All other names of models: aliases, and repositories of the hub with and without owner."""
    found: dict[str, list[str]] = dict(_document()["aliases"])
    for repository, held in _held().items():
        found[repository] = found[repository.split("/")[1]] = held
    return found


def latent_shape(
    model: CatalogModel, height: int, width: int, frames: int | None = None
) -> tuple[int, int, int] | tuple[int, int, int, int]:
    """Latents (channels, h, w) of an image of `height` × `width` pixels, (channels, f, h, w) of a video.

    Raises UserError for a video without `frames`, an image with them, and sizes that the VAE and patches do not divide.
    """
    vae = model.vae
    sides = {"a side": height} if height == width else {"the height": height, "the width": width}
    problems = [line for side, pixels in sides.items() for line in _misfit(model, side, pixels)]
    problems += _frames_misfit(model, frames)
    if model.square and height != width:
        side = min(height, width)
        problems.append(
            f"{model.name} takes only squares, and {height} × {width} was asked for; nearest: {side} × {side}"
        )
    if problems:
        raise UserError(*problems)
    rows, columns = height // vae.downsample, width // vae.downsample
    if frames is None:
        return vae.latent_channels, rows, columns
    latents = (frames - 1) // vae.temporal_downsample + 1
    return vae.latent_channels, -(-latents // model.patch_frames) * model.patch_frames, rows, columns


def batch_shape(
    model: CatalogModel, resolution: int | tuple[int, int] | None = None, frames: int | None = None
) -> BatchShape:
    """Shapes of one sample with `resolution` pixels per side or (height, width), and `frames` of a video; None: the
    model's own.

    Raises UserError if the model states no resolution or takes another one, or its text has no known length.
    """
    height, width = _native_sides(model) if resolution is None else _sides(resolution)
    if model.spec.class_name == "PaperDiT" and (height, width) != (fixed := _native_sides(model)):
        others = f"{model.name.removesuffix('-paper')} takes other sizes"
        raise UserError(f"{model.name} takes only {fixed[0]} × {fixed[1]} pixels: its positions are fixed; {others}")
    if frames is None and model.clip is not None:
        frames = model.clip.frames
    latents = latent_shape(model, height, width, frames)
    text, shape = model.text, BatchShape(latents=latents, references=model.references, first_frame=model.first_frame)
    if text is None:
        return shape
    if text.tokens is None or text.dim is None:
        raise UserError(f"the text input of {model.name} is no single (tokens, dim) sequence: {text.notes}")
    tokens = text.tokens + text.reference_tokens * model.references
    reference = editor_of(model.editor).latents(latents) if model.references else None
    own = None if reference == latents else reference
    return shape.model_copy(update={"text": (tokens, text.dim), "reference": own})


ASPECTS: tuple[tuple[int, int], ...] = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16))
"""Width to height of the usual formats of images, for `aspect`."""


def aspect_sizes(model: CatalogModel, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The usual aspect ratios at about the area of `size`, with sides that the VAE and the patches divide; only `size`
    for a model of squares."""
    if model.square:
        return (size,)
    multiple = model.vae.downsample * model.patch_size
    area = size[0] * size[1]

    def side(pixels: float) -> int:
        return max(round(pixels / multiple), 1) * multiple

    return tuple((side(math.sqrt(area * high / wide)), side(math.sqrt(area * wide / high))) for wide, high in ASPECTS)


def _sides(resolution: int | tuple[int, int]) -> tuple[int, int]:
    return (resolution, resolution) if isinstance(resolution, int) else resolution


def _native_sides(model: CatalogModel) -> tuple[int, int]:
    if model.clip is not None:
        return model.clip.height, model.clip.width
    if model.resolution is None:
        raise UserError(f"{model.name} states no native resolution; give one, such as 512 or 1024")
    return model.resolution, model.resolution


def _misfit(model: CatalogModel, side: str, pixels: int) -> list[str]:
    multiple = model.vae.downsample * model.patch_size
    if pixels >= multiple and pixels % multiple == 0:
        return []
    below = pixels // multiple * multiple
    fitting = f"{below} or {below + multiple}" if below > 0 else f"{multiple}"
    return [
        f"{side} is {pixels}, but {model.name} takes multiples of {multiple} (VAE {model.vae.downsample} × patch "
        f"{model.patch_size}); nearest: {fitting}"
    ]


def _frames_misfit(model: CatalogModel, frames: int | None) -> list[str]:
    if not model.video:
        return [] if frames is None else [f"{model.name} makes images, and {frames} frames were asked for"]
    step = model.vae.temporal_downsample
    if frames is None:
        return [f"{model.name} is a video model; give the number of frames, such as {8 * step + 1}"]
    if frames >= 1 and (frames - 1) % step == 0:
        return []
    below = (max(frames, 1) - 1) // step * step + 1
    fitting = f"{below} or {below + step}" if frames > below else f"{below}"
    return [
        f"{model.name} takes 1 frame and then multiples of {step} (VAE), and frames is {frames}; "
        f"the nearest that fit: {fitting}"
    ]


class Gate(Strict):
    """Where it was seen that a repository is gated, and when."""

    source: str
    seen: datetime.date


@cache
def gates() -> dict[str, Gate]:
    """Gated repositories, as `owner/name`."""
    return {repository: Gate.model_validate(entry) for repository, entry in _document()["gated"].items()}


def before_download(repository: str) -> str | None:
    """What to do before `hf download` of a gated repository; None for others."""
    if repository not in gates():
        return None
    return f"accept the licence at https://huggingface.co/{repository}, and log in by `hf auth login`"


class Licence(Strict):
    """The licence of repositories of the hub, with the keys of a model card."""

    license: str
    license_name: str | None = None
    license_link: str | None = None
    source: str
    repositories: tuple[str, ...]


@cache
def licences() -> tuple[Licence, ...]:
    """All licences that are known."""
    return tuple(Licence.model_validate(entry) for entry in _document()["licences"])


def licence_of(found: Sequence[str]) -> dict[str, str]:
    """The licence that all these repositories have, as keys of a model card; empty if it is not known of each."""
    known = [each for each in licences() if {*each.repositories} & {*found}]
    cards = [each.model_dump(exclude={"source", "repositories"}, exclude_none=True) for each in known]
    alike = cards and all(card == cards[0] for card in cards)
    return cards[0] if alike and {*found} <= {name for each in known for name in each.repositories} else {}
