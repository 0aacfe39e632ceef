"""From files to the pixels of a bucket, and through the identity codec and back."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bigdit.config.run import IdentityCodec
from bigdit.errors import UserError
from bigdit.features.buckets import bucket_pixels, nearest_bucket
from bigdit.features.codecs import load_image_codec, to_bytes, to_unit_range
from bigdit.features.source import ImageFolder, Unusable

SQUARE_WIDE_TALL = ((8, 8), (8, 12), (12, 8))


def gradient(width, height, mode="RGB"):
    """A picture in which each pixel differs from its neighbours."""
    rows, columns = np.mgrid[:height, :width]
    rgb = np.stack([rows * 7 % 256, columns * 11 % 256, (rows + columns) * 5 % 256], axis=-1)
    return Image.fromarray(rgb.astype(np.uint8)).convert(mode)


def test_a_folder_is_listed_in_order_with_its_captions(tmp_path):
    for name in ("b/2.PNG", "a.jpg", "b/1.webp", "c.bmp", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    source = ImageFolder(tmp_path)
    items = source.items(1, 4)
    assert len(source) == 4
    assert [(item.index, item.name) for item in items] == [(1, "b/1.webp"), (2, "b/2.PNG"), (3, "c.bmp")]
    assert items[0].caption == tmp_path / "b/1.txt"


def test_the_identity_of_a_folder_follows_its_files(tmp_path):
    gradient(8, 8).save(tmp_path / "a.png")
    first = ImageFolder(tmp_path).identity
    assert ImageFolder(tmp_path).identity == first
    (tmp_path / "a.txt").write_text("a caption")
    captioned = ImageFolder(tmp_path).identity
    (tmp_path / "a.png").rename(tmp_path / "b.png")
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    renamed = ImageFolder(tmp_path).identity
    assert len({each["digest"] for each in (first, captioned, renamed)}) == 3


def test_a_missing_and_an_empty_folder_are_errors(tmp_path):
    with pytest.raises(UserError, match=r"data\.images: the folder .*nowhere does not exist"):
        ImageFolder(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("a caption")
    with pytest.raises(UserError, match=r"data\.images: .* holds no pictures \(\.png, \.jpg"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        (None, "caption a.txt is missing"),
        (b" \n", "caption a.txt is empty"),
        (b"\xff\xfe", "caption a.txt is not UTF-8"),
    ],
)
def test_captions_that_cannot_be_used(tmp_path, caption, reason):
    gradient(8, 8).save(tmp_path / "a.png")
    if caption is not None:
        (tmp_path / "a.txt").write_bytes(caption)
    with pytest.raises(Unusable, match=reason):
        ImageFolder(tmp_path).items(0, 1)[0].load()


def test_damaged_pictures_are_unusable_and_vanished_ones_an_error(tmp_path):
    gradient(64, 64).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a caption")
    item = ImageFolder(tmp_path).items(0, 1)[0]
    whole = item.picture.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not a picture", b""):
        item.picture.write_bytes(damaged)
        with pytest.raises(Unusable, match="damaged picture: "):
            item.load()
    item.picture.unlink()
    with pytest.raises(UserError, match=r"data\.images: .*a\.png cannot be read: No such file"):
        item.load()


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.lists(st.tuples(*[st.integers(1, 64)] * 2), min_size=1, max_size=9)
)
def test_no_bucket_is_nearer_than_the_nearest(height, width, buckets):
    chosen = nearest_bucket(height, width, buckets)
    distance = {bucket: abs(math.log(bucket[0] / bucket[1] * width / height)) for bucket in buckets}
    assert distance[chosen] <= min(distance.values()) + 1e-12


def test_of_equal_aspect_ratios_the_nearest_area_is_chosen():
    buckets = [(256, 256), (1024, 1024), (512, 512)]
    assert nearest_bucket(600, 600, buckets) == (512, 512)
    assert nearest_bucket(4000, 4000, buckets) == (1024, 1024)


def test_a_picture_of_the_buckets_size_keeps_its_pixels():
    picture = gradient(12, 8)
    bucket, pixels = bucket_pixels(picture, SQUARE_WIDE_TALL, "rgb")
    assert bucket == (8, 12)
    assert np.array_equal(pixels, np.asarray(picture).transpose(2, 0, 1))


def test_larger_pictures_are_resized_and_cropped_about_the_centre():
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (100, 1)))
    _, pixels = bucket_pixels(ramp, [(8, 8)], "gray")
    centres = 50 + (np.arange(8) + 0.5) * 100 / 8 - 0.5  # columns 50 to 150, in eight
    assert pixels.shape == (1, 8, 8)
    assert np.abs(pixels[0] - centres).max() <= 1  # a ramp stays one, but for rounding


def test_exif_rotation_is_applied(tmp_path):
    picture = gradient(12, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270° to see it upright
    picture.save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as loaded:
        bucket, pixels = bucket_pixels(loaded, SQUARE_WIDE_TALL, "rgb")
    assert bucket == (12, 8)
    assert np.array_equal(pixels, np.rot90(np.asarray(picture), -1).transpose(2, 0, 1))


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "F"])
def test_every_mode_becomes_the_codecs_color(mode, color):
    picture = gradient(8, 8, "L").convert(mode) if mode in ("I;16", "F") else gradient(8, 8, mode)
    _, pixels = bucket_pixels(picture, [(8, 8)], color)
    assert pixels.shape == ((3 if color == "rgb" else 1), 8, 8)
    assert pixels.dtype == np.uint8


def test_transparency_lies_over_white_and_16_bits_are_scaled(tmp_path):
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (bucket_pixels(clear, [(8, 8)], "rgb")[1] == 255).all()
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1028
    Image.fromarray(deep).save(tmp_path / "deep.png")
    with Image.open(tmp_path / "deep.png") as loaded:
        _, pixels = bucket_pixels(loaded, [(8, 8)], "gray")
    assert np.array_equal(pixels[0], np.arange(64).reshape(8, 8) * 4)


@pytest.mark.parametrize(("color", "channels"), [("rgb", 12), ("gray", 4)])
def test_the_identity_codec_is_inverted_to_the_bit(color, channels):
    codec = load_image_codec(IdentityCodec(factor=2, color=color))
    pixels = torch.stack(
        [torch.from_numpy(bucket_pixels(gradient(96 + i, 64), [(32, 48)], color)[1].copy()) for i in range(3)]
    )
    latents = codec.encode(to_unit_range(pixels))
    assert latents.shape == (3, channels, 16, 24)
    assert (codec.channels, codec.downsample, codec.color) == (channels, 2, color)
    assert latents.abs().max() <= 1
    assert torch.equal(codec.decode(latents), to_unit_range(pixels))
    assert torch.equal(to_bytes(codec.decode(latents)), pixels)


def test_every_byte_survives_the_unit_range():
    values = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_bytes(to_unit_range(values)), values)
