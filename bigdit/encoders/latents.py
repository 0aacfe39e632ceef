"""Fits images to the pixels of their buckets, and encodes pixels to normalised latents by a VAE."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageOps
from torch.nn import functional as F

from bigdit.config.data import fitting_bucket, frames_of, written_bucket
from bigdit.errors import UserError
from bigdit.sources.protocol import CENTRED, Fit, Sample, Unusable
from bigdit.units import how_many

Color = Literal["rgb", "gray"]


def nearest_bucket(height: int, width: int, buckets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The bucket [(frames,) height, width] with the nearest aspect ratio, then with the nearest area, in logarithms."""

    def distance(bucket: tuple[int, ...]) -> tuple[float, float]:
        high, wide = bucket[-2:]
        aspect = math.log(high / wide) - math.log(height / width)
        area = math.log(high * wide) - math.log(height * width)
        return abs(aspect), abs(area)

    return min(buckets, key=distance)


def check_divides(bucket: tuple[int, ...], side: int, frames: int) -> None:
    """Raise UserError unless sides are multiples of `side`, and frames one more than a multiple of `frames`."""
    *count, height, width = bucket
    if height % side or width % side:
        nearest = written_bucket(fitting_bucket(bucket, side))
        raise UserError(
            f"data.buckets: {written_bucket(bucket)} does not divide by {side}, the pixels a side of one latent; "
            f"nearest: {nearest}"
        )
    if count and (count[0] - 1) % frames:
        below = (count[0] - 1) // frames * frames + 1
        raise UserError(
            f"data.buckets: {written_bucket(bucket)} has {count[0]} frames; the VAE takes one more than a multiple "
            f"of {frames}; nearest: {below} or {below + frames}"
        )


def bucket_pixels(
    image: Image.Image | Iterable[Image.Image], buckets: Sequence[tuple[int, ...]], color: Color, fit: Fit = CENTRED
) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """The bucket [height, width] of a decoded image (RGB or L, upright), or [frames, height, width] of a video, and its
    pixels: uint8 [C, H, W] or [C, F, H, W].

    The longer side is cropped as `fit` says. An image of the bucket's size does not change. A video gets a bucket with
    the most frames that it fills, an image one with one frame. Among these, the nearest aspect ratio decides. Frames
    are resized one by one. Raises Unusable if all buckets have more frames, or the image is too small for `fit`.
    """
    frames = iter([image] if isinstance(image, Image.Image) else image)
    first = next(frames, None)
    if first is None:
        raise Unusable("video without frames")
    buckets = _filled_buckets(first.size, buckets, fit)
    nearest = {  # by frames
        count: nearest_bucket(first.height, first.width, [each for each in buckets if frames_of(each) == count])
        for count in sorted({frames_of(each) for each in buckets})
    }
    fitted: dict[tuple[int, ...], list[npt.NDArray[np.uint8]]] = {bucket[-2:]: [] for bucket in nearest.values()}
    found = 0
    for frame in itertools.islice(itertools.chain([first], frames), max(nearest)):
        found += 1
        for size, pixels in fitted.items():
            pixels.append(_crop(frame, size, color, fit.crop_at))
    count = max((count for count in nearest if count <= found), default=None)
    if count is None:
        raise Unusable(f"video of {how_many(found, 'frame')} at data.fps; the shortest bucket has {min(nearest)}")
    bucket = nearest[count]
    pixels = fitted[bucket[-2:]][:count]
    return bucket, pixels[0] if len(bucket) == 2 else np.stack(pixels, axis=1)


def mask_latents(sample: Sample, bucket: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """The mask of an image in its bucket, for latents of `shape`: bf16 [H, W], the mean of its pixels from 0 to 1. All
    ones for an image without a mask."""
    if sample.mask is None:
        return torch.ones(shape[-2:], dtype=torch.bfloat16)
    _, pixels = bucket_pixels(sample.mask, [bucket], "gray", sample.fit)
    mean = F.adaptive_avg_pool2d(torch.tensor(pixels).float() / 255, shape[-2:])
    return mean[0].to(torch.bfloat16)


def fill_mask(sample: Sample, bucket: tuple[int, ...], seed: int) -> torch.Tensor:
    """Which pixels of an image in its bucket are painted, fp32 [1, H, W] of 0 and 1.

    They are white in its mask. Without a mask they are in a rectangle or an ellipse drawn by `seed`. Source: diffusers'
    FluxFillPipeline, and random_mask of its train_dreambooth_inpaint.py.
    """
    if sample.mask is not None:
        return binary(bucket_pixels(sample.mask, [bucket], "gray", sample.fit)[1])
    chance, sides = random.Random(seed), (bucket[-1], bucket[-2])
    mask = Image.new("L", sides)
    sizes = [chance.randint(1, side) for side in sides]
    starts = [chance.randint(0, side - size) for side, size in zip(sides, sizes, strict=True)]
    draw = ImageDraw.Draw(mask)
    shape = chance.choice((draw.rectangle, draw.ellipse))
    shape([*starts, *(start + size - 1 for start, size in zip(starts, sizes, strict=True))], fill=255)
    return binary(np.asarray(mask)[None])


def binary(mask: npt.NDArray[np.uint8]) -> torch.Tensor:
    """1 where a mask is at least half white, else 0, as in diffusers' VaeImageProcessor."""
    return torch.from_numpy(mask >= 128).float()


def _filled_buckets(size: tuple[int, int], buckets: Sequence[tuple[int, ...]], fit: Fit) -> Sequence[tuple[int, ...]]:
    """The buckets that do not enlarge an image of `size` more than `fit` allows. Raises Unusable without one."""
    width, height = size
    if min(size) < fit.min_side:
        raise Unusable(f"image of {width} × {height} pixels; data.min_side is {fit.min_side}")
    if fit.max_upscale is None:
        return buckets
    enlarged = {bucket: max(bucket[-2] / height, bucket[-1] / width) for bucket in buckets}
    if found := [bucket for bucket, factor in enlarged.items() if factor <= fit.max_upscale]:
        return found
    least = min(enlarged.values())
    raise Unusable(
        f"image of {width} × {height} pixels; every bucket enlarges it {least:.2f} times or more, and data.max_upscale "
        f"is {fit.max_upscale:g}"
    )


def _crop(image: Image.Image, size: tuple[int, ...], color: Color, at: float) -> npt.NDArray[np.uint8]:
    """The pixels [C, H, W] of an image, resized and cropped."""
    mode = "L" if color == "gray" else "RGB"
    fitted = ImageOps.fit(image.convert(mode), (size[1], size[0]), Image.Resampling.LANCZOS, centering=(at, at))
    pixels = np.asarray(fitted)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


# VAEs whose encoders take frames.
VIDEO_VAES = (
    "AutoencoderKLCogVideoX",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLMochi",
    "AutoencoderKLQwenImage",
    "AutoencoderKLWan",
)

# VAEs whose attention mask works for one sample only.
_ONE_BY_ONE = ("AutoencoderKLHunyuanVideo15",)


def one_by_one(vae: Any) -> Any:
    """The VAE. If its class cannot encode batches, it is set to encode samples one by one."""
    if type(vae).__name__ in _ONE_BY_ONE:
        vae.enable_slicing()
    return vae


def frames_a_latent(vae: Any) -> int:
    """Frames of a latent frame after the first one, which is one frame.

    Source: each VAE's class in diffusers 0.42.1. Wan's and Qwen-Image's classes read no other keys of their configs.
    """
    halved = vae.config.get("temperal_downsample")
    if halved is not None:
        return int(2 ** sum(halved))
    return int(vae.config.get("temporal_compression_ratio") or getattr(vae, "temporal_compression_ratio", 1))


@dataclass(frozen=True)
class Normalisation:
    """latents = (z − mean) × scale / deviation, over the channels of z, or of its patches of `patch` × `patch`."""

    mean: float | torch.Tensor
    scale: float = 1.0
    deviation: torch.Tensor | None = None
    patch: int = 1

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """The latents of the VAE's z [B, C, (F,) h, w]."""
        channels = self._patches(z)
        return self._whole(self._scaled(channels - _like(self.mean, channels)))

    def spread(self, deviation: torch.Tensor) -> torch.Tensor:
        """The standard deviation of latents from that of z."""
        return self._whole(self._scaled(self._patches(deviation)))

    def undo(self, latents: torch.Tensor) -> torch.Tensor:
        """The z of latents."""
        channels = self._patches(latents)
        if self.deviation is not None:
            channels = channels * _like(self.deviation, channels)
        return self._whole(channels / self.scale + _like(self.mean, channels))

    def as_condition(self, z: torch.Tensor) -> torch.Tensor:
        """The latents of z as in image-to-video pipelines, which multiply by 1 / deviation. This rounds differently."""
        if self.deviation is None:
            return self.apply(z)
        return (z - _like(self.mean, z)) * _like(1.0 / self.deviation, z)

    def described(self) -> dict[str, Any]:
        """Its numbers as JSON, with channels in the VAE's order."""
        mean = self.mean.tolist() if isinstance(self.mean, torch.Tensor) else self.mean
        deviation = {} if self.deviation is None else {"latents_std": self.deviation.tolist()}
        return {"scaling_factor": self.scale, "shift_factor" if isinstance(mean, float) else "latents_mean": mean} | (
            deviation
        )

    def _scaled(self, channels: torch.Tensor) -> torch.Tensor:
        if self.deviation is None:
            return channels * self.scale
        scaled = channels if self.scale == 1 else channels * self.scale
        return scaled / _like(self.deviation, channels)

    def _patches(self, z: torch.Tensor) -> torch.Tensor:
        return z if self.patch == 1 else F.pixel_unshuffle(z, self.patch)

    def _whole(self, channels: torch.Tensor) -> torch.Tensor:
        return channels if self.patch == 1 else F.pixel_shuffle(channels, self.patch)


def normalisation(vae: Any) -> Normalisation:
    """The normalisation in a VAE's config. Source: the family's pipeline in diffusers 0.42.1."""
    name, config = type(vae).__name__, vae.config
    if name == "AutoencoderKLFlux2":  # a batch norm's statistics, with 2 × 2 patches as channels
        deviation = torch.sqrt(vae.bn.running_var + config.batch_norm_eps)
        return Normalisation(vae.bn.running_mean, deviation=deviation, patch=2)
    if name == "AutoencoderKLLTXVideo":
        return Normalisation(vae.latents_mean, config.scaling_factor, vae.latents_std)
    scale = float(config.get("scaling_factor") or 1.0)
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        return Normalisation(torch.tensor(config.latents_mean), scale, torch.tensor(config.latents_std))
    return Normalisation(float(config.get("shift_factor") or 0.0), scale)


def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Normalised latents [B, C, (F,) h, w] of pixels [B, 3, (F,) H, W] in [-1, 1], in the VAE's dtype.

    Of a distribution they are the mode, so they are always the same.
    """
    encoded, image = _encoded(vae, pixels)
    z = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
    return normalisation(vae).apply(z.squeeze(2) if image else z)


_FIRST_MASKS = {"AutoencoderKLCogVideoX": 0, "AutoencoderKLHunyuanVideo15": 1, "AutoencoderKLLTXVideo": 0}


def first_mask(vae: Any) -> int | None:
    """The channels of a first frame's mask, for VAEs that encode the frame alone; None for others.

    The others, such as Wan 2.1's, encode the frame with a video of zeros after it. Then the mask has as many channels
    as a latent has frames. Source: diffusers 0.42.1, prepare_latents or prepare_cond_latents_and_mask of the families'
    image-to-video pipelines. Wan 2.2 5B's, whose VAE is residual, has expand_timesteps.
    """
    return _FIRST_MASKS.get(type(vae).__name__, 0 if vae.config.get("is_residual") else None)


def encode_condition(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Latents fp32 of a video's condition, pixels [B, 3, F, H, W], as `encode_latents`.

    Source: diffusers 0.42.1, as first_mask.
    """
    z, found = vae.encode(pixels).latent_dist.mode().float(), normalisation(vae)
    if vae.config.get("invert_scale_latents"):  # CogVideoX 1.5 was trained with a condition that was not scaled up
        return z / found.scale
    return found.apply(z) if type(vae).__name__ in _FIRST_MASKS else found.as_condition(z)


def first_alone(pixels: torch.Tensor) -> torch.Tensor:
    """Videos [B, C, F, H, W] with the first frame, and zeros in all others."""
    alone = torch.zeros_like(pixels)
    alone[:, :, 0] = pixels[:, :, 0]
    return alone


def encode_moments(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Mean and standard deviation [B, 2, C, (F,) h, w] of the latents' distribution, as `encode_latents`."""
    encoded, image = _encoded(vae, pixels)
    mean, deviation = encoded.latent_dist.mean, encoded.latent_dist.std
    if image:
        mean, deviation = mean.squeeze(2), deviation.squeeze(2)
    found = normalisation(vae)
    return torch.stack([found.apply(mean), found.spread(deviation)], dim=1)


def decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Pixels [B, 3, (F,) H, W] of latents [B, C, (F,) h, w] in the VAE's dtype."""
    z = normalisation(vae).undo(latents)
    image = z.dim() == 4 and type(vae).__name__ in VIDEO_VAES
    if image:
        z = z.unsqueeze(2)
    # LTX decoders from 0.9.1 on take the noise level of the latents, which is 0 by default in LTXPipeline.
    noise = (z.new_zeros(len(z)),) if vae.config.get("timestep_conditioning") else ()
    pixels: torch.Tensor = vae.decode(z, *noise).sample
    return pixels.squeeze(2) if image else pixels


def _encoded(vae: Any, pixels: torch.Tensor) -> tuple[Any, bool]:
    """The VAE's result, and whether the pixels were encoded as a video of one frame."""
    image = pixels.dim() == 4 and type(vae).__name__ in VIDEO_VAES
    return vae.encode(pixels.unsqueeze(2) if image else pixels), image


def _like(values: float | torch.Tensor, z: torch.Tensor) -> float | torch.Tensor:
    """A number as it is, or one value a channel in a shape that fits z, in its dtype and on its device."""
    return values.view(1, -1, *(1 for _ in z.shape[2:])).to(z) if isinstance(values, torch.Tensor) else values
