"""References: the images that samples are edits of, `x.reference.png` beside `x.png` or a column of a table."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from dataclasses import replace

import xxhash
from PIL import Image

from bigdit.sources.image import SUFFIXES, decode
from bigdit.sources.protocol import Contents, Unusable

_MARK = ".reference"


def is_reference(name: str) -> bool:
    """Whether a file of a folder is the reference of another one, by its name."""
    return os.path.splitext(name)[0].endswith(_MARK)


def reference_of(image: str, names: Collection[str]) -> str:
    """The name of an image's reference among the `names` of its folder; `x.reference.png` where there is none."""
    stem, suffix = os.path.splitext(image)
    asked = [f"{stem}{_MARK}{each}" for each in (suffix, *SUFFIXES)]
    return next((each for each in asked if each in names), f"{stem}{_MARK}.png")


def with_reference(contents: Contents, data: bytes, max_pixels: int) -> Contents:
    """The contents of an edit of the image whose file is `data`."""

    def digest() -> int:
        return xxhash.xxh3_64_intdigest(data, contents.digest())

    return replace(contents, digest=digest, references=(functools.partial(_decoded, data, max_pixels),))


def _decoded(data: bytes, max_pixels: int) -> Image.Image:
    try:
        return decode(data, max_pixels)
    except Unusable as error:
        raise Unusable(f"reference: {error}") from None
