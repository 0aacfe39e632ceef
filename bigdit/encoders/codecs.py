"""Pixels to latents and back: the protocol of every image codec, and the codec that keeps the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional as F

from bigdit.config.data import IdentityCodec, VaeCodec
from bigdit.encoders.batch_size import CPU_BATCH
from bigdit.encoders.latents import Color, check_divides, first_alone
from bigdit.store.part import Shape


class ImageCodec(Protocol):
    """`channels` of the latents; `downsample` pixels a side for one latent, and `temporal_downsample` frames, of which
    the first has one of its own; `color` of the pixels; the dtype
    that latents are stored in; `batch_size`: pictures worth collecting for one call."""

    channels: int
    downsample: int
    temporal_downsample: int
    color: Color
    stored_dtype: torch.dtype
    batch_size: int

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes these latents from those of another codec: a JSON object."""
        ...

    def modules(self) -> list[nn.Module]:
        """Those with weights."""
        ...

    def move(self, device: torch.device) -> None:
        """Compute there from now on, with the weights there."""
        ...

    def latent_shape(self, bucket: tuple[int, ...]) -> Shape:
        """The latents [C, f, h, w] of a video of `bucket` [frames, height, width] in pixels; of a picture of [height,
        width] [C, h, w], or with the one frame of video VAEs.

        Raises UserError where sides or frames do not divide.
        """
        ...

    def encode(self, pixels: torch.Tensor, indices: Sequence[int] = ()) -> torch.Tensor:
        """Pixels [B, 1 or 3, (F,) H, W] fp32 in [-1, 1] to latents [B, C, (f,) h, w] fp32; [B, 2, C, (f,) h, w] where
        mean and standard deviation are kept. Samples are drawn by their source `indices`, the others need none."""
        ...

    def encode_first(self, pixels: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, f, h, w] fp32 of the first frames of pixels [B, 3, F, H, W] in [-1, 1], followed by as many of
        zeros, as a model that begins with a picture is fed them: the mode, whatever is kept of videos."""
        ...

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, (f,) h, w] to pixels [B, 1 or 3, (F,) H, W] fp32, not clipped; latents of one frame are a
        picture's."""
        ...


class PixelCodec:
    """The identity codec: pixel unshuffle by `factor` of each frame, inverted to the bit by pixel shuffle."""

    stored_dtype = torch.float32
    temporal_downsample = 1

    def __init__(self, config: IdentityCodec, batch_size: int) -> None:
        self.batch_size = batch_size
        self.color: Color = config.color
        self.downsample = config.factor
        self.channels = config.factor**2 * (1 if config.color == "gray" else 3)
        self.identity = {"name": "identity", "factor": config.factor, "color": config.color}

    def modules(self) -> list[nn.Module]:
        return []

    def move(self, device: torch.device) -> None:
        pass  # pixels are unshuffled where they are

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

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        if latents.dim() == 5:
            return F.pixel_shuffle(latents.transpose(1, 2), self.downsample).transpose(1, 2)
        return F.pixel_shuffle(latents, self.downsample)


def load_image_codec(
    config: IdentityCodec | VaeCodec, device: torch.device | str = "cpu", batch_size: int = CPU_BATCH
) -> ImageCodec:
    """The codec that a run names, on `device`, for at most `batch_size` pictures at once.

    Raises UserError where its weights cannot be loaded.
    """
    if isinstance(config, IdentityCodec):
        return PixelCodec(config, batch_size)
    from bigdit.encoders.vae import DiffusersVae  # diffusers takes seconds to import

    return DiffusersVae(config, device, batch_size)


def to_unit_range(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels uint8 to fp32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels in [-1, 1] to uint8, clipped; the inverse of `to_unit_range`."""
    return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
