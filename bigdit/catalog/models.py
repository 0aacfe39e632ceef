"""Diffusion transformers: constructor arguments, verified parameter counts, and the shapes they are fed."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from bigdit.catalog.names import load_json, normalise, resolve
from bigdit.errors import UserError
from bigdit.spec import BatchShape, ModelSpec, Strict

# The diffusers classes that bigdit.models has a family adapter for: only these can be rehearsed and trained.
FAMILIES = frozenset({"SanaTransformer2DModel"})


class TextInput(Strict):
    """The text embeddings a model is fed, (tokens, dim) per sample; None where that is not one known shape."""

    encoder: str
    tokens: PositiveInt | None
    dim: PositiveInt | None
    notes: str | None


class Vae(Strict):
    """The autoencoder of a model's latents: pixels per latent in space and frames per latent in time."""

    name: str
    class_name: str
    kwargs: dict[str, Any] | None
    downsample: PositiveInt
    temporal_downsample: PositiveInt
    latent_channels: PositiveInt
    params: PositiveInt | None
    encoder_params: PositiveInt | None
    source: str
    notes: str | None


class CatalogModel(Strict):
    """A diffusion transformer of the catalogue.

    `params` and `buffer_elems` are counts of elements; `block_lists` the module lists of repeated blocks with
    their lengths, in the order of the forward pass; `patch_size` is in latents, and counts a packing outside
    the model; `resolution` the side in pixels of the squares it was published for, None for video and where
    none is stated; `unverified` what about the entry was not verified.
    """

    spec: ModelSpec
    params: PositiveInt
    buffer_elems: NonNegativeInt
    block_lists: tuple[tuple[str, PositiveInt], ...]
    gradient_checkpointing: bool
    text: TextInput | None
    vae: Vae
    patch_size: PositiveInt
    resolution: PositiveInt | None
    video: bool
    source: tuple[str, ...]
    unverified: str | None
    notes: str | None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def obstacle(self) -> str | None:
        """Why this model cannot be rehearsed and trained now; None where it can."""
        if self.spec.class_name not in FAMILIES:
            return f"no family adapter yet: {self.spec.class_name}"
        if self.spec.kwargs.get("guidance_embeds"):
            return f"the adapter of {self.spec.class_name} feeds no guidance, which this distilled model embeds"
        return None

    @property
    def trainable(self) -> bool:
        return self.obstacle is None


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
    """The model of that name or alias. Raises UserError for an unknown or ambiguous name."""
    return _model(resolve("model", name, normalise(name), _document()["models"], _document()["aliases"]))


def _refuse_video(model: CatalogModel) -> None:
    if model.video:
        raise UserError(f"{model.name} is a video model, whose latents have frames; pictures were asked for")


def latent_shape(model: CatalogModel, height: int, width: int) -> tuple[int, int, int]:
    """Latents (channels, h, w) of a picture of `height` × `width` pixels.

    Raises UserError for a video model, and for pixels that the VAE's downsample × patch size does not divide.
    """
    _refuse_video(model)
    vae, multiple = model.vae, model.vae.downsample * model.patch_size
    problems = []
    for side, pixels in (("height", height), ("width", width)):
        if pixels < multiple or pixels % multiple:
            below = pixels // multiple * multiple
            fitting = f"{below} or {below + multiple}" if below > 0 else f"{multiple}"
            problems.append(
                f"{model.name} takes pixels in multiples of {multiple} (VAE {vae.downsample} × patch "
                f"{model.patch_size}), and the {side} is {pixels}; the nearest that fit: {fitting}"
            )
    if problems:
        raise UserError(*problems)
    return vae.latent_channels, height // vae.downsample, width // vae.downsample


def batch_shape(model: CatalogModel, resolution: int | None = None) -> BatchShape:
    """Shapes of one square sample with `resolution` pixels a side, the model's own where it is None.

    Raises UserError where the model states no resolution, or is fed no single text sequence of known length.
    """
    _refuse_video(model)
    side = resolution if resolution is not None else model.resolution
    if side is None:
        raise UserError(f"{model.name} states no native resolution; give one, such as 512 or 1024")
    latents = latent_shape(model, side, side)
    text = model.text
    if text is None:
        return BatchShape(latents=latents)
    if text.tokens is None or text.dim is None:
        raise UserError(f"the text input of {model.name} is no single (tokens, dim) sequence: {text.notes}")
    return BatchShape(latents=latents, text=(text.tokens, text.dim))
