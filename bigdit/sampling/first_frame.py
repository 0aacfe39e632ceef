"""First frames of the videos that are drawn, for models that begin with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from bigdit.config.data import MAX_PIXELS
from bigdit.encoders.buckets import bucket_pixels
from bigdit.encoders.first_frame import FirstFrames
from bigdit.errors import UserError
from bigdit.loader.first_frame import extras_of
from bigdit.sources.disk import PICTURE_BYTES, read_file
from bigdit.sources.picture import decode
from bigdit.sources.protocol import Unusable
from bigdit.sources.videos.resample import Clip
from bigdit.sources.videos.video import is_video, video_frames

_ONE = Clip(1, 1)


def asked_image(option: str, path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """As first_image. Raises UserError, which names the option or key that asked for it, where there is none."""
    try:
        return first_image(path, max_pixels)
    except (OSError, Unusable) as error:
        raise UserError(f"{option} {path} cannot be read: {error}") from None


def first_image(path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture of a file, or the first frame of a video, upright, of mode RGB or L. Raises FileNotFoundError;
    Unusable, with the reason; UserError where it cannot be read."""
    if not is_video(path):
        return decode(read_file(path, PICTURE_BYTES), max_pixels)
    frame = next(video_frames(path, _ONE, max_pixels), None)
    if frame is None:
        raise Unusable("video without frames")
    return frame


def first_frame_extras(
    frames: FirstFrames, images: Sequence[Image.Image], bucket: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The extras [images, …] fp32, on the host, of videos of `bucket` [(frames,) height, width] that begin with these
    images; a picture is cropped to the bucket as extraction does it."""
    found = [_extras(frames, each, bucket) for each in images]  # one by one: a whole video is made of each
    return {name: torch.cat([each[name] for each in found]).float() for name in found[0]}


def _extras(frames: FirstFrames, image: Image.Image, bucket: tuple[int, ...]) -> dict[str, torch.Tensor]:
    _, pixels = bucket_pixels(image, [bucket[-2:]], frames.color)
    video = torch.zeros(1, len(pixels), bucket[0] if len(bucket) == 3 else 1, *bucket[-2:], dtype=torch.uint8)
    video[0, :, 0] = torch.from_numpy(pixels)
    return extras_of(frames.encode(video), frames.mask)
