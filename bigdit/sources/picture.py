"""From a file's bytes to a picture that encoders can take: upright, opaque, 8 bits, RGB or gray."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from bigdit.config.data import MAX_PIXELS
from bigdit.files import IS_LFS_POINTER, is_lfs_pointer
from bigdit.sources.protocol import Unusable

# What pictures of data sets are; Pillow's other decoders, some of which start programs, are never tried.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "TIFF", "GIF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".gif")

# First bytes of what people have beside them; pillow-heif registers itself, and is not tried either.
_UNREAD = {
    rb"....ftyp(hei|hev|mif1|msf1)": "HEIC",
    rb"\xff\x0a|....JXL ": "JPEG XL",
    rb"....jP  ": "JPEG 2000",
    rb"8BPS": "PSD",
    rb"\s*<(\?xml|svg)": "SVG",
}

MAX_ASPECT = 100
"""The longer side over the shorter one. Beyond it a bucket keeps next to nothing, and rows take memory of their own."""

# Pillow only warns of pictures above its limit and below twice as much; here they are refused by name.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The first frame as RGB, or as L where it has no color: EXIF rotation applied, transparency laid over white,
    16 bits scaled to 8; color profiles and densities are not applied. Raises Unusable, with the reason."""
    with opened(data, max_pixels) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return flat(image)


@contextlib.contextmanager
def opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """A picture's file, none of whose pixels are decoded yet. Raises Unusable, with the reason, for one that is too
    large, and for what Pillow raises while the picture is used."""
    # Pillow has one limit for the process, and refuses twice as many pixels before ours is checked.
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
        raise Unusable(_not_read(data)) from None
    except Exception as error:  # Pillow's decoders raise many classes on damaged files
        # Without the addresses that objects happen to have: the same picture gives the same reason.
        reason = re.sub(r" object at 0x[0-9a-f]+", "", " ".join(str(error).split()))
        raise Unusable(f"damaged picture: {type(error).__name__}: {reason}") from None


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise Unusable for an image or a frame with more pixels, or with sides that differ too much."""
    longer, shorter = max(width, height), min(width, height)
    if longer > MAX_ASPECT * shorter:
        raise Unusable(f"image of {width} × {height} pixels; one side is at most {MAX_ASPECT} times the other")
    if width * height > max_pixels:
        raise _too_large(f"{width} × {height} = {width * height}", max_pixels)


def _too_large(pixels: str, max_pixels: int) -> Unusable:
    return Unusable(f"image of {pixels} pixels; data.max_pixels allows {max_pixels}")


def _not_read(data: bytes) -> str:
    """What a file is that Pillow does not know or may not try, by its first bytes."""
    if is_lfs_pointer(data):
        return f"picture {IS_LFS_POINTER}"
    for start, kind in _UNREAD.items():
        if re.match(start, data, re.DOTALL):
            return f"picture in {kind}, which is not read; convert it to PNG or JPEG"
    return f"damaged picture: it begins as none of {', '.join(FORMATS)}"


def flat(image: Image.Image) -> Image.Image:
    """The picture in mode L or RGB, opaque."""
    if image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.mode in ("I", "F"):
        raise Unusable(f"picture of 32 bits a sample (mode {image.mode}), whose white is unknown; save it with 8 or 16")
    gray = image.mode in ("1", "L", "LA", "La")
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(opaque, image.convert("RGBA"))
    return image.convert("L" if gray else "RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit gray as 8 bits: Pillow's own conversion clips at 255 instead of scaling."""
    deep = np.asarray(image).astype(np.uint32)
    gray = ((deep + 128) // 257).astype(np.uint8)  # 65535 = 255 · 257
    transparent = image.info.get("transparency")
    if transparent is not None:
        gray[deep == transparent] = 255
    return Image.fromarray(gray)
