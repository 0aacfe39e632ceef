"""Decodes the bytes of a file to an image for encoders: upright, opaque, 8 bits, RGB or gray.

References are the images before an edit. They are `x.reference.png` beside `x.png`, `x.reference2.png` and so on, or a
column of a table. Crops and mirror images of an image are samples too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import unicodedata
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import xxhash
from PIL import Image, ImageOps, UnidentifiedImageError

from bigdit.config.data import MAX_PIXELS
from bigdit.files import IS_LFS_POINTER, is_lfs_pointer
from bigdit.sources.protocol import CENTRED, Contents, DerivedItem, Fit, Item, Several, Source, Unusable

# The formats of data sets. Pillow's other decoders are never tried: some start programs.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "TIFF", "GIF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".gif")

# The first bytes of formats that are not read. pillow-heif registers itself, but is not tried either.
_UNREAD = {
    rb"....ftyp(hei|hev|mif1|msf1)": "HEIC",
    rb"\xff\x0a|....JXL ": "JPEG XL",
    rb"....jP  ": "JPEG 2000",
    rb"8BPS": "PSD",
    rb"\s*<(\?xml|svg)": "SVG",
}

MAX_ASPECT = 100
"""The largest ratio of the sides of an image. A bucket would keep next to nothing of longer ones."""

# Pillow only warns between its limit and twice the limit. `check_pixels` rejects such images.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The first frame as RGB, or as L if it has no color.

    EXIF rotation is applied, transparency becomes white, 16 bits are scaled to 8. Color profiles and densities are not
    applied. Raises Unusable, with the reason.
    """
    with opened(data, max_pixels) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return flat(image)


def alpha(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image | None:
    """The opacity of an image in mode L, upright; None if all of it is opaque. Raises Unusable as `decode`."""
    with opened(data, max_pixels) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGBA").getchannel("A") if image.has_transparency_data else None


@contextlib.contextmanager
def opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image without decoding its pixels. Raises Unusable, with the reason, for one that is too large, and for
    whatever Pillow raises while the image is used."""
    # Pillow has one limit for the process, and raises at twice that limit before check_pixels can.
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, max_pixels)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_pixels(image.width, image.height, max_pixels)
            yield image
    except (MemoryError, Unusable):
        raise
    except Image.DecompressionBombError as error:
        pixels = re.search(r"\d+", str(error))
        raise _too_large(pixels[0] if pixels else "more", max_pixels) from None
    except UnidentifiedImageError:
        raise Unusable(_unknown_format(data)) from None
    except Exception as error:  # Pillow's decoders raise many classes on damaged files
        # Addresses of objects would give the same image another reason each time.
        reason = re.sub(r" object at 0x[0-9a-f]+", "", " ".join(str(error).split()))
        raise Unusable(f"damaged image: {type(error).__name__}: {reason}") from None


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise Unusable for an image or a frame with too many pixels, or an extreme aspect ratio."""
    longer, shorter = max(width, height), min(width, height)
    if longer > MAX_ASPECT * shorter:
        raise Unusable(f"image of {width} × {height} pixels; one side is at most {MAX_ASPECT} times the other")
    if width * height > max_pixels:
        raise _too_large(f"{width} × {height} = {width * height}", max_pixels)


def _too_large(pixels: str, max_pixels: int) -> Unusable:
    return Unusable(f"image of {pixels} pixels; data.max_pixels allows {max_pixels}")


def _unknown_format(data: bytes) -> str:
    """What the first bytes say of a file that Pillow does not know or must not try."""
    if is_lfs_pointer(data):
        return f"image {IS_LFS_POINTER}"
    if not data:
        return "damaged image: the file is empty"
    for start, kind in _UNREAD.items():
        if re.match(start, data, re.DOTALL):
            return f"image in {kind}, which is not supported; convert it to PNG or JPEG"
    return f"damaged image: it is none of {', '.join(FORMATS)}"


def flat(image: Image.Image) -> Image.Image:
    """The image in mode L or RGB, opaque."""
    if image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.mode in ("I", "F"):
        raise Unusable(f"image of 32 bits a sample (mode {image.mode}): its range is unknown; save it with 8 or 16")
    gray = image.mode in ("1", "L", "LA", "La")
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(opaque, image.convert("RGBA"))
    return image.convert("L" if gray else "RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit gray scaled to 8 bits. Pillow's own conversion clips at 255."""
    deep = np.asarray(image).astype(np.uint32)
    gray = ((deep + 128) // 257).astype(np.uint8)  # 65535 = 255 · 257
    transparent = image.info.get("transparency")
    if transparent is not None:
        gray[deep == transparent] = 255
    return Image.fromarray(gray)


MASK, REFERENCE = ".mask", ".reference"
"""The ends of the stems of masks and references."""

OTHERS = {MASK: ("_mask", "-masklabel"), REFERENCE: ("-condlabel",)}
"""The ends of masks and references of other trainers. OneTrainer's end in `label`."""


def reference_marks(references: int) -> list[str]:
    """The ends of the stems of so many references: .reference, .reference2, …"""
    return [REFERENCE, *(f"{REFERENCE}{number}" for number in range(2, references + 1))][:references]


def usual_mark(image: str, mark: str) -> str:
    """`a.mask.png`, of `a.jpg`."""
    return f"{os.path.splitext(image)[0]}{mark}.png"


def marked(names: Collection[str], mark: str) -> dict[str, str]:
    """The images of a folder whose stem ends with a mark, in any case and with any suffix, by name. PNG come last.

    The values are the stems of the images that they belong to, as from `owner`. Those of other trainers come first.
    They count only beside that image, and without a text of their own.
    """
    others: dict[str, str] = {}
    for end in OTHERS.get(mark, ()):
        others |= _ending(names, end)
    if others:
        owners = {owner(name) for name in names if os.path.splitext(name)[1].lower() in SUFFIXES}
        texts = {owner(name) for name in names if name.lower().endswith(".txt")}
        others = {name: stem for name, stem in others.items() if stem in owners and owner(name) not in texts}
    return others | _ending(names, mark)


def _ending(names: Collection[str], end: str) -> dict[str, str]:
    """The images whose stem has this end, PNG last, with the rest of their stem."""
    found = {}
    for name in names:
        if end in name.lower():
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in SUFFIXES and stem.lower().endswith(end):
                found[name] = unicodedata.normalize("NFC", stem[: -len(end)])
    return dict(sorted(found.items(), key=lambda each: (each[0].endswith(".png"), each[0])))


def owner(image: str) -> str:
    """The stem of an image, composed, as masks and references name it."""
    return unicodedata.normalize("NFC", os.path.splitext(image)[0])


def with_references(contents: Contents, files: Sequence[bytes], max_pixels: int) -> Contents:
    """The contents of an edit, with the images before the edit in these files."""

    def digest() -> int:
        found = contents.digest()
        for data in files:
            found = xxhash.xxh3_64_intdigest(data, found)
        return found

    names = ["reference"] if len(files) == 1 else [f"reference {number}" for number in range(1, len(files) + 1)]
    decoders = tuple(functools.partial(decode_part, *each, max_pixels) for each in zip(names, files, strict=True))
    return replace(contents, digest=digest, references=decoders)


def decode_part(part: str, data: bytes, max_pixels: int) -> Image.Image:
    """As `decode`, for the mask or a reference of an image. Errors name the part."""
    try:
        return decode(data, max_pixels)
    except Unusable as error:
        raise Unusable(f"{part}: {error}") from None


def _crop_and_flip(crop_at: float, flipped: bool, contents: Contents) -> Contents:
    if crop_at == CENTRED.crop_at and not flipped:
        return contents

    def digest() -> int:
        return xxhash.xxh3_64_intdigest(f"{crop_at} {flipped}".encode(), contents.digest())

    cropped = replace(contents, fit=Fit(crop_at), digest=digest)
    if not flipped:
        return cropped
    mask = contents.mask
    flipped_mask = None if mask is None else lambda: None if (read := mask()) is None else _flip(read)
    references = tuple(functools.partial(lambda read: _flip(read()), each) for each in contents.references)
    return replace(cropped, decode=lambda: _flip_all(contents.decode()), mask=flipped_mask, references=references)


def _flip_all(found: Image.Image | Iterator[Image.Image]) -> Image.Image | Iterator[Image.Image]:
    return _flip(found) if isinstance(found, Image.Image) else map(_flip, found)


def _flip(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


class Varied(Several):
    """The crops of each item of a source, one after another, and their mirror images."""

    def __init__(self, source: Source, crops: int, flip: bool) -> None:
        places = [0.5] if crops == 1 else [number / (crops - 1) for number in range(crops)]
        self._variants = [(place, flipped) for flipped in (False, True)[: 1 + flip] for place in places]
        self._crops = crops
        super().__init__(source, len(self._variants), f"as {self._variants}")

    def _item(self, index: int, item: Item) -> DerivedItem:
        place, flipped = self._variants[index % len(self._variants)]
        name = item.name if self._crops == 1 else f"{item.name} cropped at {place:g}"
        change = functools.partial(_crop_and_flip, place, flipped)
        return DerivedItem(index, f"{name} mirrored" if flipped else name, item, change)
