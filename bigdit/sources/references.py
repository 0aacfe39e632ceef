"""References, the images that samples are edits of: `x.reference.png` beside `x.png`, or a column of a table. Masks,
`x.mask.png`, are found likewise."""

from __future__ import annotations

import functools
import os
import unicodedata
from collections.abc import Collection
from dataclasses import replace

import xxhash
from PIL import Image

from bigdit.sources.image import SUFFIXES, decode
from bigdit.sources.protocol import Contents, Unusable

MASK, REFERENCE = ".mask", ".reference"
"""How the stems of masks and references end."""


def usual(image: str, mark: str) -> str:
    """`a.mask.png`, of `a.jpg`."""
    return f"{os.path.splitext(image)[0]}{mark}.png"


def marked(names: Collection[str], mark: str) -> dict[str, str]:
    """The images among the `names` of a folder whose stem ends with a mark, whatever their suffix and capitals are, and
    what they belong to, as `owner` has it. PNG come last."""
    found = {}
    for name in names:
        if mark in name.lower():
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in SUFFIXES and stem.lower().endswith(mark):
                found[name] = unicodedata.normalize("NFC", stem[: -len(mark)])
    return dict(sorted(found.items(), key=lambda each: (each[0].endswith(".png"), each[0])))


def owner(image: str) -> str:
    """What marks of an image name: its stem, composed."""
    return unicodedata.normalize("NFC", os.path.splitext(image)[0])


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
