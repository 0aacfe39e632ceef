"""The frozen encoders of a model: VAE and text encoders."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from bigdit.catalog.families import mask_of, stream_shapes
from bigdit.catalog.models import CatalogModel, TextInput
from bigdit.catalog.names import load_json
from bigdit.errors import UserError
from bigdit.strategy import BatchShape, Strict

Dtype = Literal["fp32", "bf16", "fp16"]
Gives = Literal["states", "pooled", "both"]
Pixels = tuple[PositiveInt, PositiveInt, PositiveInt] | tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt]

POOLED_TEXT = "pooled_text"
"""The name of pooled text vectors among a batch's extras."""


class VaeSpec(Strict):
    """A diffusers VAE, with its decoder as in trainers. `tiling`: it encodes large images in tiles."""

    class_name: str
    kwargs: dict[str, Any]
    dtype: Dtype = "fp32"
    tiling: bool = False


class TextEncoderSpec(Strict):
    """A transformers text encoder. Of `tokens` ids, the first `skip` and the last `cut` belong to a template.

    `gives`: hidden states, a pooled vector, or both. `layers`: indices of transformers' `hidden_states`; empty for the
    last, normalised. Several are joined along the features, or with `in_rows` along the tokens. The states become
    text_embeds, or the further text named `stream`.
    """

    class_name: str
    config_class: str
    kwargs: dict[str, Any]
    dtype: Dtype = "bf16"
    tokens: PositiveInt
    gives: Gives = "states"
    layers: tuple[int, ...] = ()
    in_rows: bool = False
    skip: NonNegativeInt = 0
    cut: NonNegativeInt = 0
    stream: str | None = None


class OnlineEncoders(Strict):
    """The encoders that run during training. `pixels`: the shape of a sample, (channels, height, width), or (channels,
    frames, height, width) of a video.

    States of encoders with the same number of tokens are joined along the features. The results are joined along the
    tokens, the narrower ones padded with zeros. Pooled vectors are joined along the features. A stream has one encoder.
    """

    pixels: Pixels
    vae: VaeSpec
    text: tuple[TextEncoderSpec, ...] = ()

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of the extras that the encoders make."""
        pooled = (POOLED_TEXT,) if any(encoder.gives != "states" for encoder in self.text) else ()
        streams = [encoder.stream for encoder in self.text if encoder.stream is not None]
        return (*pooled, *(each for name in streams for each in (name, mask_of(name))))


class Part(Strict):
    """One encoder of a model. `tokens`: None for the model's number. `positions`: if they differ from its class's.
    A `stream` of several layers has those that the model reads."""

    name: str
    gives: Gives = "states"
    tokens: int | None = None
    layers: tuple[int, ...] = ()
    skip: int = 0
    cut: int = 0
    class_name: str | None = None
    stream: str | None = None
    positions: int | None = None


_RECIPES = {
    (each["encoder"], each["dim"]): tuple(Part.model_validate(part) for part in each["parts"])
    for each in load_json("families.json")["text"]
}
"""The parts by encoder and width in a model's entry."""

# VAEs that trainers cast to the training dtype; others stay in fp32, against overflows.
# Source: diffusers' examples/dreambooth/train_dreambooth_lora_sana.py (fp32), train_dreambooth_flux.py (cast).
_CAST_VAES = ("flux2-vae", "cogvideox-vae", "hunyuanvideo-vae", "ltx-vae", "qwen-image-vae")
_CAST_FAMILIES = ("FluxTransformer2DModel", "ChromaTransformer2DModel")


def online_encoders(
    model: CatalogModel, batch: BatchShape, text_dtype: Dtype | None = None, *, vae_dtype: Dtype | None = None
) -> OnlineEncoders:
    """The encoders that make samples of `batch` for `model`, in the usual dtypes of trainers.

    Raises UserError if the catalogue lacks one.
    """
    vae = model.vae
    if batch.references or batch.first_frame:
        raise UserError("samples with a reference or a first frame need features cached; use that")
    if vae.kwargs is None:
        raise UserError(
            f"{model.name} cannot be planned with features online: the catalogue has no constructor arguments of "
            f"its {vae.name}; use features cached"
        )
    cast = vae.name in _CAST_VAES or model.spec.class_name in _CAST_FAMILIES
    return OnlineEncoders(
        pixels=_pixels(model, batch),
        vae=VaeSpec(class_name=vae.class_name, kwargs=vae.kwargs, dtype=vae_dtype or ("bf16" if cast else "fp32")),
        text=tuple(
            each.model_copy(update={"dtype": text_dtype or each.dtype}) for each in _text_encoders(model, batch)
        ),
    )


def caption_tokens(text: TextInput) -> int | None:
    """The tokens that a pipeline truncates captions to. Stable Diffusion 3 has more states, with CLIP's."""
    parts = _RECIPES.get((text.encoder, text.dim or 0), ())
    own = [part.tokens for part in parts if part.gives != "pooled" and part.stream is None]
    known = [each for each in own if each is not None]
    return max(known) if known and known == own else text.tokens


def _pixels(model: CatalogModel, batch: BatchShape) -> Pixels:
    """The pixels of the latents. The first latent frame is one frame, each other one a group of frames."""
    height, width = (side * model.vae.downsample for side in batch.latents[-2:])
    if len(batch.latents) == 3:
        return 3, height, width
    return 3, 1 + (batch.latents[1] - 1) * model.vae.temporal_downsample, height, width


def _text_encoders(model: CatalogModel, batch: BatchShape) -> tuple[TextEncoderSpec, ...]:
    text = model.text
    if text is None or batch.text is None:
        return ()
    recipe = _RECIPES.get((text.encoder, text.dim or 0))
    if recipe is None:
        known = ", ".join(sorted({encoder for encoder, _ in _RECIPES}))
        raise UserError(
            f"{model.name} cannot be planned with features online: the catalogue has no recipe of its text encoder "
            f"{text.encoder}; use features cached; known are {known}"
        )
    streams = stream_shapes(model.spec.class_name, model.spec.kwargs)
    return tuple(_text_encoder(part, part.tokens or batch.text[0], streams) for part in recipe)


def _text_encoder(part: Part, tokens: int, streams: dict[str, tuple[int, int]]) -> TextEncoderSpec:
    entry = load_json("models.json")["text_encoders"][part.name]
    states, _ = streams.get(part.stream or "", (tokens, 0))
    in_rows = states > tokens  # HiDream's Llama: the states of each layer, without the embedding
    return TextEncoderSpec(
        class_name=part.class_name or entry["class_name"],
        config_class=entry["config_class"],
        kwargs=entry["kwargs"] | ({} if part.positions is None else {"max_position_embeddings": part.positions}),
        tokens=tokens + part.skip + part.cut,
        gives=part.gives,
        layers=tuple(range(1, states // tokens + 1)) if in_rows else part.layers,
        in_rows=in_rows,
        skip=part.skip,
        cut=part.cut,
        stream=part.stream,
    )
