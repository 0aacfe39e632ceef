"""From a decoded picture to the pixels of its bucket."""

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
    """The bucket [height, width] of a decoded picture (RGB or L, upright), and its pixels there: uint8 [C, H, W].

    The longer side is cropped about the centre; a picture of the bucket's size keeps its pixels as they are.
    """
    bucket = nearest_bucket(image.height, image.width, buckets)
    fitted = ImageOps.fit(image.convert("L" if color == "gray" else "RGB"), bucket[::-1], Image.Resampling.LANCZOS)
    pixels = np.asarray(fitted)
    channels_first = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return bucket, np.ascontiguousarray(channels_first)
