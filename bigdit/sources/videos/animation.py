"""Animated GIF, WebP, PNG and AVIF files: frames with the times that they are shown at."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction

import xxhash
from PIL import Image

from bigdit.sources.picture import damages_told, decode, flat, opened
from bigdit.sources.protocol import Caption, Contents
from bigdit.sources.videos.resample import Clip, Timed, resampled

_FORMATS = ("GIF", "WEBP", "PNG", "AVIF")  # the pages of a TIFF are no frames
_UNTIMED_MS = 100
"""Of a frame that says 0: browsers show it so long. Source: https://bugzilla.mozilla.org/show_bug.cgi?id=139677"""


def moving_or_still(data: bytes, clip: Clip) -> Image.Image | Iterator[Image.Image]:
    """The clip's frames of an animated file, or the picture of another. Raises Unusable, as `decode`."""
    with damages_told(), opened(data) as image:
        animated = image.format in _FORMATS and getattr(image, "is_animated", False)
    return resampled(_timed(data), clip) if animated else decode(data)


def contents_of(data: bytes, clip: Clip | None, captions: tuple[Caption, ...], label: str | int | None) -> Contents:
    """Those of a picture's bytes, which may be animated where a `clip` of videos is taken."""
    shown = functools.partial(decode, data) if clip is None else functools.partial(moving_or_still, data, clip)
    return Contents(shown, functools.partial(xxhash.xxh3_64_intdigest, data), captions, label)


def _timed(data: bytes) -> Iterator[Timed[Image.Image]]:
    time = Fraction(0)
    with damages_told(), opened(data) as image:
        for number in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(number)
            image.load()
            shown = Fraction(image.info.get("duration") or _UNTIMED_MS).limit_denominator(1000) / 1000
            yield time, shown, flat(image)
            time += shown
