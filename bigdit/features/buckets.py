"""From a decoded picture to the pixels of its bucket: orientation, color, size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

Color = Literal["rgb", "gray"]


def nearest_bucket(height: int, width: int, buckets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The bucket [height, width] of the nearest aspect ratio on a log scale; of equals, the nearest in area."""

    def distance(bucket: tuple[int, int]) -> tuple[float, float]:
        aspect = math.log(bucket[0] / bucket[1]) - math.log(height / width)
        area = math.log(bucket[0] * bucket[1]) - math.log(height * width)
        return abs(aspect), abs(area)

    return min(buckets, key=distance)


def bucket_pixels(
    image: Image.Image, buckets: Sequence[tuple[int, int]], color: Color
) -> tuple[tuple[int, int], npt.NDArray[np.uint8]]:
    """The picture's bucket [height, width], and its pixels there: uint8 [C, H, W].

    EXIF rotation is applied, transparency laid over white, the longer side cropped about the centre; a picture
    of the bucket's size keeps its pixels as they are.
    """
    upright = _flat(ImageOps.exif_transpose(image), color)
    bucket = nearest_bucket(upright.height, upright.width, buckets)
    fitted = ImageOps.fit(upright, (bucket[1], bucket[0]), Image.Resampling.LANCZOS)
    pixels = np.asarray(fitted)
    channels_first = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return bucket, np.ascontiguousarray(channels_first)


def _flat(image: Image.Image, color: Color) -> Image.Image:
    """The picture in the mode of the codec: L or RGB, 8 bits, opaque."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        # Pillow clips these modes at 255 instead of scaling them; files of this kind hold 16 bits.
        high = np.asarray(image, np.float64) / 257.0
        image = Image.fromarray(high.round().clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(opaque, image.convert("RGBA"))
    return image.convert("L" if color == "gray" else "RGB")
