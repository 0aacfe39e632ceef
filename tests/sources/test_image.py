"""Images of every mode and depth are decoded, or refused by name; damaged ones, too."""

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from tiny_sources import damage, gradient, opened, pixels, reason, save

from bigdit.sources.image import decode
from bigdit.sources.protocol import Unusable


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        *[(mode, "png") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")],
        *[(mode, "tif") for mode in ("CMYK", "YCbCr", "LAB", "I;16B")],
        *[(mode, "jpg") for mode in ("L", "RGB", "CMYK")],
        *[("RGB", suffix) for suffix in ("webp", "avif", "bmp", "gif")],
    ],
)
def test_images_of_every_mode_become_rgb_or_gray(tmp_path, mode, suffix):
    gray = mode in ("1", "L", "LA", "I;16", "I;16B")
    made = gradient(16, 16, "L").convert(mode) if mode.startswith("I;16") else gradient(16, 16, mode)
    save(tmp_path / f"a.{suffix}", image=made)
    image = opened(str(tmp_path)).items(0, 1)[0].load().image
    assert image.mode == ("L" if gray else "RGB")
    assert image.size == (16, 16)


def loaded(tmp_path, image, suffix="png", **options):
    """An image, written and read."""
    save(tmp_path / f"a.{suffix}", image=image, **options)
    return opened(str(tmp_path)).items(0, 1)[0].load().image


def test_exif_rotation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270° to see it upright
    upright = loaded(tmp_path, gradient(12, 8), exif=exif)
    assert pixels(upright) == np.rot90(np.asarray(gradient(12, 8)), -1).tolist()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_lies_over_white(tmp_path, mode):
    if mode == "P":
        clear, options = gradient(8, 8, "P").point(lambda _: 3), {"transparency": 3}
    else:
        clear, options = Image.new("RGBA", (8, 8), (255, 0, 0, 0)).convert(mode), {}
    assert set(np.asarray(loaded(tmp_path, clear, **options)).flat) == {255}


@pytest.mark.parametrize("suffix", ["tif", "jpg"])
def test_cmyk_without_ink_is_white_and_with_all_black(tmp_path, suffix):
    cmyk = Image.new("CMYK", (16, 8))
    cmyk.paste((0, 0, 0, 255), (8, 0, 16, 8))
    image = loaded(tmp_path, cmyk, suffix)
    assert (image.getpixel((0, 0)), image.getpixel((15, 7))) == ((255,) * 3, (0,) * 3)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_scaled(tmp_path, suffix):
    deep = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    image = loaded(tmp_path, Image.fromarray(deep), suffix)
    assert pixels(image) == np.arange(256).reshape(16, 16).tolist()


def png_16(samples, color_type, *chunks, size=None):
    """A PNG with 16-bit samples [H, W, C], which Pillow does not write for every colour type. `size`: a false (width,
    height) in its header."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width, height = size or samples.shape[1::-1]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    header = struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize(("color_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bits_of_every_png_are_scaled(tmp_path, color_type, channels):
    """Type 0 is gray, 2 RGB, 4 and 6 with alpha, which is opaque here."""
    deep = np.repeat(np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16, 1), channels, axis=2)
    if color_type in (4, 6):
        deep[..., -1] = 65535
    save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(png_16(deep, color_type))
    image = opened(str(tmp_path)).items(0, 1)[0].load().image
    assert image.mode == ("L" if color_type == 0 else "RGB")  # Pillow reads gray with alpha as RGBA
    assert np.array_equal(np.asarray(image).reshape(256, -1)[:, 0], np.arange(256))


def test_a_gray_of_16_bits_that_means_transparent_becomes_white(tmp_path):
    deep = np.array([[[0], [1000], [65535]]], np.uint16)
    save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(png_16(deep, 0, (b"tRNS", struct.pack(">H", 1000))))
    assert pixels(opened(str(tmp_path)).items(0, 1)[0].load().image) == [[0, 255, 255]]


def test_32_bits_are_refused_by_name(tmp_path):
    with pytest.raises(Unusable, match=r"32 bits a sample \(mode F\): its range is unknown; save it with 8 or 16"):
        loaded(tmp_path, gradient(8, 8, "F"), "tif")


EMPTY = np.zeros((0, 0, 1), np.uint16)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # pytest undoes filters of modules
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((10_000, 9_000), "image of 10000 × 9000 = 90000000 pixels; data.max_pixels allows 89478485"),
        ((20_000, 10_000), "image of 200000000 pixels; data.max_pixels allows 89478485"),
        ((1, 80_000_000), "image of 1 × 80000000 pixels; one side is at most 100 times the other"),
    ],
)
def test_too_large_images_are_refused_by_their_headers(tmp_path, size, expected):
    save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(png_16(EMPTY, 0, size=size))
    assert reason(opened(str(tmp_path)).items(0, 1)[0]) == expected


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # pytest undoes filters of modules
def test_a_image_of_108_megapixels_is_read_where_the_limit_is_raised(tmp_path):
    save(tmp_path / "a.png", image=Image.new("1", (12_000, 9_000)))
    (found,) = opened(str(tmp_path), max_pixels=108_000_000).items(0, 1)
    assert found.load().image.size == (12_000, 9_000)
    (tmp_path / "a.png").write_bytes(png_16(EMPTY, 0, size=(20_000, 10_000)))
    assert reason(opened(str(tmp_path), max_pixels=200_000_000).items(0, 1)[0]).startswith("damaged image: ")


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0", "image in HEIC, which is not supported; convert it to PNG or JPEG"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0", "image in HEIC, which is not supported; convert it to PNG or JPEG"),
        (b"\xff\x0a\xfa\x1f", "image in JPEG XL, which is not supported; convert it to PNG or JPEG"),
        (
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            "image in SVG, which is not supported; convert it to PNG or JPEG",
        ),
        (b"no image", "damaged image: it is none of PNG, JPEG, WEBP, AVIF, BMP, TIFF, GIF"),
    ],
)
def test_files_that_are_no_images_are_named_by_what_they_are(tmp_path, start, expected):
    save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(start)
    assert reason(opened(str(tmp_path)).items(0, 1)[0]) == expected


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of Pillow, about damaged metadata
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "avif", "tif", "gif", "bmp"])
def test_damaged_images_are_decoded_or_unusable(suffix):
    buffer = io.BytesIO()
    gradient(32, 24).save(buffer, {"jpg": "JPEG", "tif": "TIFF"}.get(suffix, suffix.upper()))
    for seed in range(80):
        with contextlib.suppress(Unusable):
            assert decode(damage(buffer.getvalue(), seed)).mode in ("L", "RGB")
