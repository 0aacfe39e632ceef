"""VAEs of diffusers in a folder. Their latents are normalised as their config says."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import torch
from torch import nn
from torch.nn import functional as F

from bigdit.config.data import VaeCodec, frames_of, written_bucket
from bigdit.encoders.folder import DTYPES, check_files, load_from, load_from_file, read_config, weights_sample
from bigdit.encoders.latents import (
    VIDEO_VAES,
    Color,
    check_divides,
    decode_latents,
    encode_condition,
    encode_latents,
    encode_moments,
    first_alone,
    first_mask,
    frames_a_latent,
    normalisation,
    one_by_one,
)
from bigdit.encoders.protocol import BatchSize
from bigdit.errors import UserError
from bigdit.store.part import Shape
from bigdit.store.tensors import config_digest, weights_digest

_KEY = "encoders.image.path"
_FOR_IMAGES = "AutoencoderKLQwenImage"  # a video VAE whose transformers take latents without frames


class DiffusersVae:
    """A VAE of VaeCodec, in eval mode. A video VAE encodes an image as a video of one frame."""

    stored_dtype = torch.bfloat16

    def __init__(self, config: VaeCodec, device: torch.device | str, batch_size: int) -> None:
        if config.config is None and config.path.is_file():
            raise UserError(
                f"{_KEY}: {config.path} is one file; set encoders.image.config to the folder of the VAE's config.json, "
                "such as vae/ of its pipeline"
            )
        self._saved = read_config(_KEY, config.described_in)
        if self._saved.get("_class_name") != config.class_name:
            raise UserError(
                f"{_KEY}: {config.described_in} holds a {self._saved.get('_class_name')}, and "
                f"encoders.image.class_name is {config.class_name}"
            )
        if config.latents != "mode" and config.class_name == "AutoencoderDC":
            raise UserError(
                f"encoders.image.latents is {config.latents}, and AutoencoderDC gives no distribution; use mode"
            )
        self._config = config
        self.batch_size = batch_size
        self._size = BatchSize(batch_size)
        self._vae = one_by_one(_load(config).to(device))
        self._device = torch.device(device)
        found = self._vae.config
        self.channels = int(found.get("latent_channels") or found.z_dim)
        ratio = found.get("spatial_compression_ratio") or getattr(self._vae, "spatial_compression_ratio", None)
        self.downsample = int(ratio or 2 ** (len(found.block_out_channels) - 1))
        self.temporal_downsample = frames_a_latent(self._vae)
        mask = first_mask(self._vae)
        self.first_mask = self.temporal_downsample if mask is None else mask
        self.color: Color = "gray" if found.get("in_channels") == 1 else "rgb"
        self._frames = config.class_name in VIDEO_VAES and config.class_name != _FOR_IMAGES
        if config.tiling:
            self._vae.enable_tiling()

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that changes the latents, with digests of the weights."""
        return {
            "name": "vae",
            "class_name": self._config.class_name,
            "config": config_digest(self._saved),
            "weights": weights_digest(self._vae.state_dict()),
            "weights_sample": weights_sample(self._config.path, self._config.dtype),
            "dtype": self._config.dtype,
            "latents": self._config.latents,
            **({"seed": self._config.seed} if self._config.latents == "sampled" else {}),
            **({"tiling": True} if self._config.tiling else {}),
            **normalisation(self._vae).described(),
        }

    def modules(self) -> list[nn.Module]:
        return [self._vae]

    def move(self, device: torch.device) -> None:
        self._vae.to(device)
        self._device = device

    def latent_shape(self, bucket: tuple[int, ...]) -> Shape:
        if len(bucket) == 3 and not self._frames:
            raise UserError(
                f"data.buckets: {written_bucket(bucket)} has frames, and {self._config.class_name} encodes images; "
                f"use {list(bucket[1:])}"
            )
        check_divides(bucket, self.downsample * normalisation(self._vae).patch, self.temporal_downsample)
        height, width = (side // self.downsample for side in bucket[-2:])
        if not self._frames:
            return self.channels, height, width
        return self.channels, (frames_of(bucket) - 1) // self.temporal_downsample + 1, height, width

    def encode(self, pixels: torch.Tensor, indices: Sequence[int] = ()) -> torch.Tensor:
        return self._encode_rows(pixels, lambda rows: self._encode(self._prepare(pixels[rows]), indices[rows]))

    def encode_mode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self._encode_rows(pixels, lambda rows: self._encode_mode(self._prepare(pixels[rows])))

    def _encode_rows(self, pixels: torch.Tensor, encode: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """The latents of pixels, with as many rows at once as fit in memory.

        Raises UserError if the latents do not have the size that the config says.
        """
        latents = torch.stack(self._size.map(lambda rows: encode(slice(rows[0], rows[-1] + 1)), range(len(pixels))))
        bucket = tuple(pixels.shape[2:])
        expected = self.latent_shape(bucket)
        found = latents.shape[-len(expected) :]
        if found != expected:
            raise UserError(
                f"{_KEY}: {self._config.path} encodes {written_bucket(bucket)} pixels as latents of "
                f"{written_bucket(tuple(found))}, and its config.json says {written_bucket(expected)}; correct its "
                "temporal_compression_ratio or spatial_compression_ratio"
            )
        return latents

    @torch.no_grad()
    def _encode(self, pixels: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
        """Encode one batch. Memory may run out."""
        if self._config.latents == "mode":
            return self._encode_mode(pixels)
        moments = encode_moments(self._vae, pixels).float()
        if self._config.latents == "moments":
            return moments
        mean, deviation = moments.unbind(1)
        if len(indices) != len(mean):
            raise ValueError(f"sampling latents of {len(mean)} images needs as many indices; got {len(indices)}")
        noise = torch.stack([_noise(self._config.seed, index, mean.shape[1:]) for index in indices])
        return mean + deviation * noise.to(mean)

    @torch.no_grad()
    def _encode_mode(self, pixels: torch.Tensor) -> torch.Tensor:
        return encode_latents(self._vae, pixels).float()

    def _prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels in the VAE's dtype, on its device, with frames if it takes frames."""
        prepared = pixels.to(self._device, DTYPES[self._config.dtype])
        return prepared.unsqueeze(2) if self._frames and pixels.dim() == 4 else prepared

    @torch.no_grad()
    def encode_first(self, pixels: torch.Tensor) -> torch.Tensor:
        def encode(places: Sequence[int]) -> torch.Tensor:
            video = pixels[places[0]].unsqueeze(0)
            alone = first_alone(video) if first_mask(self._vae) is None else video[:, :, :1]
            latents = encode_condition(self._vae, alone.to(self._device, DTYPES[self._config.dtype]))
            frames = (video.shape[2] - 1) // self.temporal_downsample + 1
            return F.pad(latents, (0, 0, 0, 0, 0, frames - latents.shape[2]))

        return torch.stack(BatchSize(1).map(encode, range(len(pixels))))  # one by one, as in the pipeline

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        pixels = decode_latents(self._vae, latents.to(self._device, DTYPES[self._config.dtype])).float()
        return pixels.squeeze(2) if self._frames and pixels.shape[2] == 1 else pixels


def _noise(seed: int, index: int, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal noise of one sample. It depends on neither device, batch nor worker."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
    return torch.randn(tuple(shape), generator=generator)


def _load(config: VaeCodec) -> Any:
    kind, dtype = getattr(diffusers, config.class_name), DTYPES[config.dtype]
    if config.config is not None:
        return load_from_file(kind, _KEY, config.path, read_config(_KEY, config.config), dtype)
    check_files(_KEY, config.path)
    return load_from(kind, _KEY, config.path, torch_dtype=dtype)
