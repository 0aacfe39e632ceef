"""Interfaces of image codecs and text encoders, batches that shrink when memory runs out, and the identity codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from bigdit.config.data import IdentityCodec
from bigdit.encoders.latents import Color, check_divides, first_alone
from bigdit.errors import UserError
from bigdit.shortage import ran_out
from bigdit.store.part import Shape
from bigdit.store.text import TEXT, Text

T = TypeVar("T")
R = TypeVar("R")

CPU_BATCH = 16
"""The batch size if the device's memory is unknown. On a CPU, larger batches cost memory and are not faster."""

MAX_TOKENS = "encoders.text.max_tokens"
"""The key with the most tokens of a caption."""

_PATIENCE = 8  # successful batches before a larger one is tried; doubles with each failure


@dataclass(frozen=True)
class EncodedBatch:
    """An encoded micro-batch: latents [B, C, (F,) h, w] fp32; text_embeds [B, T, D], text_mask [B, T] and extras in the
    dtype of the encoders."""

    latents: torch.Tensor
    text_embeds: torch.Tensor | None
    text_mask: torch.Tensor | None
    extras: dict[str, torch.Tensor]


class ImageCodec(Protocol):
    """Turns pixels into latents and back.

    `channels`: of latents. `first_mask`: channels of a first frame's mask. `downsample`: pixels on a side of a latent.
    `temporal_downsample`: frames of a latent frame after the first one, which is one frame. `color`: of the pixels.
    `stored_dtype`: of latents. `batch_size`: images of one call.
    """

    channels: int
    first_mask: int
    downsample: int
    temporal_downsample: int
    color: Color
    stored_dtype: torch.dtype
    batch_size: int

    @property
    def identity(self) -> dict[str, Any]:
        """A JSON object. It differs between codecs whose latents differ."""
        ...

    def modules(self) -> list[nn.Module]:
        """The modules with weights."""
        ...

    def move(self, device: torch.device) -> None:
        """Move the weights to `device`, and compute there."""
        ...

    def latent_shape(self, bucket: tuple[int, ...]) -> Shape:
        """The shape [C, (f,) h, w] of latents for a bucket [(frames,) height, width] in pixels.

        Video VAEs have a frame for images too. Raises UserError if sides or frames do not divide.
        """
        ...

    def encode(self, pixels: torch.Tensor, indices: Sequence[int] = ()) -> torch.Tensor:
        """Pixels [B, 1 or 3, (F,) H, W] fp32 in [-1, 1] to latents [B, C, (f,) h, w] fp32.

        If mean and standard deviation are stored: [B, 2, C, (f,) h, w]. The source `indices` seed sampled latents.
        """
        ...

    def encode_first(self, pixels: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, f, h, w] fp32 of the first frames of pixels [B, 3, F, H, W] in [-1, 1], for image-to-video
        models. They are always the mode. Zeros follow the first frame."""
        ...

    def encode_mode(self, pixels: torch.Tensor) -> torch.Tensor:
        """As `encode`, but always the mode, for the images before an edit."""
        ...

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, (f,) h, w] to pixels [B, 1 or 3, (F,) H, W] fp32, not clipped. Latents of one frame give an
        image."""
        ...


class PixelCodec:
    """The identity codec: pixel unshuffle of each frame by `factor`. Pixel shuffle inverts it exactly."""

    stored_dtype = torch.float32
    first_mask = temporal_downsample = 1

    def __init__(self, config: IdentityCodec, batch_size: int) -> None:
        self.batch_size = batch_size
        self.color: Color = config.color
        self.downsample = config.factor
        self.channels = config.factor**2 * (1 if config.color == "gray" else 3)
        self.identity = {"name": "identity", "factor": config.factor, "color": config.color}

    def modules(self) -> list[nn.Module]:
        return []

    def move(self, device: torch.device) -> None:
        pass  # it computes on the device of the pixels

    def latent_shape(self, bucket: tuple[int, ...]) -> Shape:
        check_divides(bucket, self.downsample, 1)
        *frames, height, width = bucket
        return cast(Shape, (self.channels, *frames, height // self.downsample, width // self.downsample))

    def encode(self, pixels: torch.Tensor, indices: Sequence[int] = ()) -> torch.Tensor:
        if pixels.dim() == 5:
            return F.pixel_unshuffle(pixels.transpose(1, 2), self.downsample).transpose(1, 2)
        return F.pixel_unshuffle(pixels, self.downsample)

    def encode_first(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.encode(first_alone(pixels))

    def encode_mode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.encode(pixels)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        if latents.dim() == 5:
            return F.pixel_shuffle(latents.transpose(1, 2), self.downsample).transpose(1, 2)
        return F.pixel_shuffle(latents, self.downsample)


def to_unit_range(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels uint8 to fp32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def masked_out(codec: ImageCodec, pixels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Latents of pixels [B, C, H, W] that are gray where the mask [B, 1, H, W] is 1, and the mask in further channels.

    Returns bf16 [B, C + pixels a latent, h, w] in CPU memory. The mask's channels are the pixels of a latent, row by
    row. Source: diffusers 0.42.1, FluxFillPipeline.prepare_mask_latents, which samples from the VAE's distribution.
    This is its mode.
    """
    latents = codec.encode_mode(pixels * (1 - mask)).to("cpu", torch.bfloat16)
    return torch.cat([latents, F.pixel_unshuffle(mask, codec.downsample).to(torch.bfloat16)], dim=1).contiguous()


def to_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels in [-1, 1] to uint8, clipped. This is the inverse of `to_unit_range`."""
    return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def is_clip(module: nn.Module) -> bool:
    """Whether it is a CLIP text encoder of transformers."""
    return type(module).__name__.startswith("CLIPText")


Keep = Callable[[Text], Text]
"""A function for each text, called as soon as its batch is encoded."""


def as_it_is(text: Text) -> Text:
    """The text itself."""
    return text


Images = Sequence[Sequence[Image.Image]]
"""For each caption, the images that it edits. Encoders whose `Editor.seen` is set read them."""


class TextEncoder(Protocol):
    """Encodes captions. `dim`: of states. `pooled_dim`: of the vector, or None. `max_tokens`: of a caption.

    `streams`: [max_tokens, dim] of each further text encoder, by name.
    """

    dim: int
    pooled_dim: int | None
    max_tokens: int
    streams: Mapping[str, tuple[int, int]]

    @property
    def identity(self) -> dict[str, Any]:
        """A JSON object. It differs between encoders whose texts differ."""
        ...

    def modules(self) -> list[nn.Module]:
        """The modules with weights."""
        ...

    def encode(self, captions: Sequence[str], kept: Keep = as_it_is, images: Images = ()) -> list[Text]:
        """The texts of captions. `kept` is called on each, and may move it off the encoder's device. Encoders that read
        `images` need them."""
        ...

    def null(self) -> Text:
        """The unconditional text for guidance (Ho & Salimans, arXiv:2207.12598)."""
        ...


def shapes_of(encoder: TextEncoder) -> dict[str, tuple[int, int]]:
    """[max_tokens, dim] of the text itself and of each stream, as FeatureStore.text_shapes."""
    return {TEXT: (encoder.max_tokens, encoder.dim), **encoder.streams}


class OneIsTooMuch(UserError):
    """Memory does not suffice for one sample."""


class BatchSize:
    """A batch size of at most `most`. `size` halves when memory runs out, and doubles later."""

    def __init__(self, most: int) -> None:
        self.most = self.size = most
        self._patience, self._well = _PATIENCE, 0

    def map(self, encode: Callable[[Sequence[T]], Sequence[R]], samples: Sequence[T]) -> list[R]:
        """`encode` of all samples, in batches, in order: one result a sample.

        Raises OneIsTooMuch if memory does not suffice for one sample.
        """
        results: list[R] = []
        while len(results) < len(samples):
            batch = samples[len(results) : len(results) + self.size]
            encoded = self._attempt(encode, batch)
            if encoded is None:
                self._shrink(len(batch))
            else:
                results += encoded
                self._grow(len(batch))
        return results

    def _attempt(self, encode: Callable[[Sequence[T]], Sequence[R]], batch: Sequence[T]) -> Sequence[R] | None:
        """The results of `encode`; None if memory ran out. Drops the error, since it keeps tensors allocated."""
        try:
            return encode(batch)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            return None

    def _shrink(self, failed: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the larger batch has left fragments
        if failed == 1:
            raise OneIsTooMuch(
                "encoders.batch_size: memory does not suffice for one sample at a time; use smaller data.buckets, bf16 "
                "as the encoders' dtype, encoders.image.tiling, or fewer workers"
            )
        self.size = failed // 2
        self._patience, self._well = 2 * self._patience, 0

    def _grow(self, done: int) -> None:
        self._well += done == self.size
        if self.size < self.most and self._well >= self._patience:
            self.size, self._well = min(2 * self.size, self.most), 0


def encode_by_length(
    captions: Sequence[str],
    tokens: Sequence[int],
    size: BatchSize,
    encode: Callable[[Sequence[int]], Sequence[Text]],
    kept: Keep = as_it_is,
) -> list[Text]:
    """The texts of `captions` in order, each after `kept`. `encode` gets places of captions with similar `tokens`.

    So batches need little padding. The longest come first, so a lack of memory shows at once.
    """
    order = sorted(range(len(captions)), key=lambda place: (-tokens[place], captions[place]))
    texts = size.map(lambda places: [kept(text) for text in encode(places)], order)
    by_place = dict(zip(order, texts, strict=True))
    return [by_place[place] for place in range(len(captions))]
