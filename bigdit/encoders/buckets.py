"""From a decoded picture, or the frames of a video, to the pixels of its bucket."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from bigdit.config.data import fitting_bucket, frames_of, written_bucket
from bigdit.errors import UserError
from bigdit.sources.protocol import Unusable

Color = Literal["rgb", "gray"]


def nearest_bucket(height: int, width: int, buckets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The bucket [(frames,) height, width] of the nearest aspect ratio on a log scale; of equals, of the area."""

    def distance(bucket: tuple[int, ...]) -> tuple[float, float]:
        high, wide = bucket[-2:]
        aspect = math.log(high / wide) - math.log(height / width)
        area = math.log(high * wide) - math.log(height * width)
        return abs(aspect), abs(area)

    return min(buckets, key=distance)


def check_divides(bucket: tuple[int, ...], side: int, frames: int) -> None:
    """Raise UserError where sides are no multiples of `side`, or frames not one and then multiples of `frames`."""
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
            f"data.buckets: {written_bucket(bucket)} has {count[0]} frames, and the VAE takes one and then multiples "
            f"of {frames}; nearest: {below} or {below + frames}"
        )


def bucket_pixels(
    image: Image.Image | Iterable[Image.Image], buckets: Sequence[tuple[int, ...]], color: Color
) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """The bucket [height, width] of a decoded picture (RGB or L, upright), or [frames, height, width] of a video, and
    its pixels there: uint8 [C, H, W], or [C, F, H, W].

    The longer side is cropped about the centre; a picture of the bucket's size keeps its pixels as they are. A video
    goes to the buckets of the most frames that it has, a picture to those of one, and of these to the nearest aspect
    ratio. Frames are brought to size one by one. Raises Unusable where there are no buckets of so few frames.
    """
    frames = iter([image] if isinstance(image, Image.Image) else image)
    first = next(frames, None)
    if first is None:
        raise Unusable("video without frames")
    nearest = {  # by frames
        count: nearest_bucket(first.height, first.width, [each for each in buckets if frames_of(each) == count])
        for count in sorted({frames_of(each) for each in buckets})
    }
    fitted: dict[tuple[int, ...], list[npt.NDArray[np.uint8]]] = {bucket[-2:]: [] for bucket in nearest.values()}
    found = 0
    for frame in itertools.islice(itertools.chain([first], frames), max(nearest)):
        found += 1
        for size, pixels in fitted.items():
            pixels.append(_fitted(frame, size, color))
    count = max((count for count in nearest if count <= found), default=None)
    if count is None:
        raise Unusable(f"{found} of the {min(nearest)} frames of the shortest bucket, at data.fps")
    bucket = nearest[count]
    pixels = fitted[bucket[-2:]][:count]
    return bucket, pixels[0] if len(bucket) == 2 else np.stack(pixels, axis=1)


def _fitted(image: Image.Image, size: tuple[int, ...], color: Color) -> npt.NDArray[np.uint8]:
    """[C, H, W]."""
    mode = "L" if color == "gray" else "RGB"
    fitted = ImageOps.fit(image.convert(mode), (size[1], size[0]), Image.Resampling.LANCZOS)
    pixels = np.asarray(fitted)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
