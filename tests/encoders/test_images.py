"""From images to a bucket's pixels, through the identity codec and back."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bigdit.config.data import IdentityCodec
from bigdit.encoders.latents import bucket_pixels, nearest_bucket
from bigdit.encoders.load import load_image_codec
from bigdit.encoders.protocol import to_bytes, to_unit_range
from bigdit.sources.protocol import Fit, Unusable

SQUARE_WIDE_TALL = ((8, 8), (8, 12), (12, 8))


def gradient(width, height, mode="RGB"):
    """An image in which each pixel differs from its neighbours."""
    rows, columns = np.mgrid[:height, :width]
    rgb = np.stack([rows * 7 % 256, columns * 11 % 256, (rows + columns) * 5 % 256], axis=-1)
    return Image.fromarray(rgb.astype(np.uint8)).convert(mode)


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


def test_a_image_of_the_buckets_size_keeps_its_pixels():
    image = gradient(12, 8)
    bucket, pixels = bucket_pixels(image, SQUARE_WIDE_TALL, "rgb")
    assert bucket == (8, 12)
    assert np.array_equal(pixels, np.asarray(image).transpose(2, 0, 1))


def test_larger_images_are_resized_and_cropped_about_the_centre():
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (100, 1)))
    _, pixels = bucket_pixels(ramp, [(8, 8)], "gray")
    centres = 50 + (np.arange(8) + 0.5) * 100 / 8 - 0.5  # columns 50 to 150, in eight
    assert pixels.shape == (1, 8, 8)
    assert np.abs(pixels[0] - centres).max() <= 1  # a ramp stays a ramp, up to rounding


@pytest.mark.parametrize(("at", "first"), [(0, 0), (0.5, 50), (1, 100)])
def test_a_crop_is_where_it_is_asked_for(at, first):
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (100, 1)))
    for image, axis in ((ramp, 1), (ramp.transpose(Image.Transpose.TRANSPOSE), 0)):
        _, pixels = bucket_pixels(image, [(8, 8)], "gray", Fit(crop_at=at))
        centres = first + (np.arange(8) + 0.5) * 100 / 8 - 0.5
        assert np.abs(np.moveaxis(pixels[0], axis, -1) - centres).max() <= 1


def test_images_that_a_bucket_would_enlarge_too_much_take_another_or_none():
    buckets = [(64, 64), (128, 128), (64, 128)]
    wide = gradient(100, 50)
    assert bucket_pixels(wide, buckets, "rgb", Fit(max_upscale=1.3))[0] == (64, 128)
    assert bucket_pixels(wide, buckets, "rgb", Fit(max_upscale=1.28))[0] == (64, 128)  # exactly
    assert bucket_pixels(gradient(90, 70), buckets, "rgb", Fit(max_upscale=1))[0] == (64, 64)
    with pytest.raises(Unusable, match=r"^image of 100 × 50 pixels; every bucket enlarges it 1\.28 times"):
        bucket_pixels(wide, buckets, "rgb", Fit(max_upscale=1.27))
    with pytest.raises(Unusable, match=r"^image of 100 × 50 pixels; data\.min_side is 51$"):
        bucket_pixels(wide, buckets, "rgb", Fit(min_side=51))
    assert bucket_pixels(wide, buckets, "rgb", Fit(min_side=50))[0] == (64, 128)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_image_takes_the_codecs_color(mode):
    image = gradient(8, 8, mode)
    for color, into in (("rgb", "RGB"), ("gray", "L")):
        _, pixels = bucket_pixels(image, [(8, 8)], color)
        expected = np.asarray(image.convert(into)).reshape(8, 8, -1).transpose(2, 0, 1)
        assert pixels.dtype == np.uint8
        assert np.array_equal(pixels, expected)


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
