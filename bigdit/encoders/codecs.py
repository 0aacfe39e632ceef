"""Pixels to latents and back: the protocol of every image codec, and the codec that keeps the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from bigdit.config.run import IdentityCodec, VaeCodec
from bigdit.encoders.batch_size import CPU_BATCH
from bigdit.encoders.buckets import Color
from bigdit.errors import UserError
from bigdit.store.part import Shape


class ImageCodec(Protocol):
    """`channels` of the latents; `downsample` pixels a side for one latent; `color` of the pixels; the dtype
    that latents are stored in; `batch_size`: pictures worth collecting for one call."""

    channels: int
    downsample: int
    color: Color
    stored_dtype: torch.dtype
    batch_size: int

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes these latents from those of another codec: a JSON object."""
        ...

    def latent_shape(self, bucket: tuple[int, int]) -> Shape:
        """The latents [C, (1,) h, w] of a picture of `bucket` [height, width] pixels; one frame of video VAEs.

        Raises UserError where a side does not divide.
        """
        ...

    def encode(self, pixels: torch.Tensor, indices: Sequence[int] = ()) -> torch.Tensor:
        """Pixels [B, 1 or 3, H, W] fp32 in [-1, 1] to latents [B, C, (1,) h, w] fp32; [B, 2, C, (1,) h, w] where
        mean and standard deviation are kept. Samples are drawn by their source `indices`, the others need none."""
        ...

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, (1,) h, w] to pixels [B, 1 or 3, H, W] fp32, not clipped."""
        ...


class PixelCodec:
    """The identity codec: pixel unshuffle by `factor`, inverted to the bit by pixel shuffle."""

    stored_dtype = torch.float32

    def __init__(self, config: IdentityCodec, batch_size: int) -> None:
        self.batch_size = batch_size
        self.color: Color = config.color
        self.downsample = config.factor
        self.channels = config.factor**2 * (1 if config.color == "gray" else 3)
        self.identity = {"name": "identity", "factor": config.factor, "color": config.color}

    def latent_shape(self, bucket: tuple[int, int]) -> Shape:
        side = self.downsample
        if bucket[0] % side or bucket[1] % side:
            raise UserError(f"data.buckets: {bucket[0]} × {bucket[1]} does not divide by {side}")
        return self.channels, bucket[0] // side, bucket[1] // side

    def encode(self, pixels: torch.Tensor, indices: Sequence[int] = ()) -> torch.Tensor:
        return F.pixel_unshuffle(pixels, self.downsample)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
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
