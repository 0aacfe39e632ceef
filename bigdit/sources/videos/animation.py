"""Animated GIF, WebP, PNG and AVIF files: frames with the times that they are shown at."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction

import xxhash
from PIL import Image

from bigdit.sources.picture import check_pixels, decode, flat, opened
from bigdit.sources.protocol import Caption, Contents
from bigdit.sources.videos.resample import Clip, Timed, resampled

_FORMATS = ("GIF", "WEBP", "PNG", "AVIF")  # the pages of a TIFF are no frames
_UNTIMED_MS = 100
"""Of a frame that says 0: browsers show it so long. Source: https://bugzilla.mozilla.org/show_bug.cgi?id=139677"""


def moving_or_still(data: bytes, clip: Clip | None, max_pixels: int) -> Image.Image | Iterator[Image.Image]:
    """The clip's frames of an animated file; the picture of another, or where no clip is taken. Raises Unusable, as
    `decode`."""
    if clip is None:
        return decode(data, max_pixels)
    with opened(data, max_pixels) as image:
        animated = image.format in _FORMATS and getattr(image, "is_animated", False)
    return resampled(_timed(data, max_pixels), clip) if animated else decode(data, max_pixels)


def contents_of(
    data: bytes, clip: Clip | None, max_pixels: int, captions: tuple[Caption, ...], label: str | int | None
) -> Contents:
    """Those of a picture's bytes, which may be animated where a `clip` of videos is taken."""
    shown = functools.partial(moving_or_still, data, clip, max_pixels)
    return Contents(shown, functools.partial(xxhash.xxh3_64_intdigest, data), captions, label)


def _timed(data: bytes, max_pixels: int) -> Iterator[Timed[Image.Image]]:
    time = Fraction(0)
    with opened(data, max_pixels) as image:
        for number in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(number)
            check_pixels(image.width, image.height, max_pixels)  # a GIF's frames may go beyond its own size
            image.load()
            shown = Fraction(image.info.get("duration") or _UNTIMED_MS).limit_denominator(1000) / 1000
            yield time, shown, flat(image)
            time += shown
