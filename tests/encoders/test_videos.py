"""Videos to latents and back: their buckets, the VAEs that take frames, and what a video model does not accept."""

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vaes import VIDEO_VAES, kl, ltx

from bigdit.config.data import IdentityCodec, VaeCodec
from bigdit.encoders.fit import size_misfits
from bigdit.encoders.latents import bucket_pixels
from bigdit.encoders.load import load_image_codec
from bigdit.errors import UserError
from bigdit.sources.protocol import Unusable
from bigdit.strategy import ModelSpec

LENGTHS = [(1, 8, 8), (5, 8, 8), (9, 8, 8), (9, 8, 16), (5, 4, 8)]


def frames(count, height=8, width=8):
    """Frames; the n-th has the value n."""
    return (Image.new("RGB", (width, height), (number,) * 3) for number in range(count))


@pytest.mark.parametrize(
    ("count", "sides", "bucket"),
    [
        (1, (8, 8), (1, 8, 8)),
        (4, (8, 8), (1, 8, 8)),
        (5, (8, 8), (5, 8, 8)),
        (8, (32, 32), (5, 8, 8)),
        (9, (8, 8), (9, 8, 8)),
        (40, (32, 64), (9, 8, 16)),
        (6, (32, 64), (5, 4, 8)),
    ],
)
def test_a_video_goes_to_the_most_frames_and_then_the_nearest_ratio(count, sides, bucket):
    found, pixels = bucket_pixels(frames(count, *sides), LENGTHS, "rgb")
    assert found == bucket
    assert pixels.shape == (3, *bucket)
    assert pixels[:, :, 0, 0].tolist() == [list(range(bucket[0]))] * 3


def test_images_are_videos_of_one_frame_and_stay_images():
    image = Image.new("RGB", (8, 8))
    assert bucket_pixels(image, [(8, 8), (5, 8, 8)], "rgb")[1].shape == (3, 8, 8)
    assert bucket_pixels(image, [(1, 8, 8), (5, 8, 8)], "gray")[1].shape == (1, 1, 8, 8)
    for count, found in ((4, "4 frames"), (1, "1 frame")):
        with pytest.raises(Unusable, match=rf"^video of {found} at data\.fps; the shortest bucket has 5$"):
            bucket_pixels(frames(count), [(9, 8, 8), (5, 8, 8)], "rgb")
    with pytest.raises(Unusable, match=r"^video without frames$"):
        bucket_pixels(iter(()), LENGTHS, "rgb")


def test_no_more_frames_are_taken_than_the_longest_bucket_has():
    given = frames(20)
    bucket_pixels(given, LENGTHS, "rgb")
    assert len(list(given)) == 11


@pytest.fixture
def pixels():
    return torch.rand(2, 3, 5, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("class_name", sorted(VIDEO_VAES))
def test_every_vae_of_videos_gives_what_its_own_pass_over_them_does(class_name, tmp_path, pixels):
    make, shape, normalised = VIDEO_VAES[class_name]
    torch.manual_seed(0)
    vae = make().eval()
    vae.save_pretrained(tmp_path)
    codec = load_image_codec(VaeCodec(class_name=class_name, path=tmp_path))
    assert codec.latent_shape((5, 16, 24)) == shape
    assert codec.latent_shape((1, 16, 24)) == codec.latent_shape((16, 24)) == (shape[0], 1, *shape[2:])
    latents = codec.encode(pixels)
    with torch.no_grad():
        z = vae.encode(pixels).latent_dist.mode()
        decoded = vae.decode(z).sample
    assert latents.shape == (2, *shape)
    assert torch.allclose(latents, normalised(vae, z), atol=1e-5)
    assert codec.decode(latents).shape == pixels.shape
    assert torch.allclose(codec.decode(latents), decoded, atol=1e-4)
    step = codec.temporal_downsample
    with pytest.raises(UserError, match=rf"4 × 16 × 24 has 4 frames; .* multiple of {step}; nearest: {5 - step} or 5$"):
        codec.latent_shape((4, 16, 24))


@pytest.mark.parametrize(("printed", "reported"), [("temporal", "4 × 2 × 4 × 6"), ("spatial", "4 × 3 × 2 × 3")])
def test_a_config_that_divides_otherwise_than_its_weights_is_named(printed, reported, tmp_path, pixels):
    torch.manual_seed(0)
    ltx(**{f"{printed}_compression_ratio": {"temporal": 4, "spatial": 8}[printed]}).save_pretrained(tmp_path)
    codec = VaeCodec(name="vae", class_name="AutoencoderKLLTXVideo", path=str(tmp_path))
    encode = load_image_codec(codec, device="cpu", batch_size=1).encode
    with pytest.raises(UserError) as raised:
        encode(pixels)
    assert str(raised.value).startswith(
        f"encoders.image.path: {tmp_path} encodes 5 × 16 × 24 pixels as latents of 4 × 3 × 4 × 6, and its config.json "
        f"says {reported}; correct its "
    )


def test_pixels_of_videos_are_latents_frame_by_frame(pixels):
    codec = load_image_codec(IdentityCodec(factor=2))
    latents = codec.encode(pixels)
    assert latents.shape == (2, *codec.latent_shape((5, 16, 24)))
    assert torch.equal(latents[:, :, 3], codec.encode(pixels[:, :, 3]))
    assert torch.equal(codec.decode(latents), pixels)


def test_tiles_are_blended_and_reported(tmp_path):
    make, _, _ = VIDEO_VAES["AutoencoderKLWan"]
    make().save_pretrained(tmp_path)
    large = torch.rand(1, 3, 1, 272, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1  # beyond a tile of 256
    whole, tiled = (
        load_image_codec(VaeCodec(class_name="AutoencoderKLWan", path=tmp_path, tiling=tiling))
        for tiling in (False, True)
    )
    there, here = whole.encode(large), tiled.encode(large)
    assert here.shape == there.shape
    assert 0 < (here - there).abs().mean() < 0.1 * there.abs().mean()
    assert tiled.identity == whole.identity | {"tiling": True}


def test_a_vae_of_images_takes_no_videos(tmp_path):
    kl().save_pretrained(tmp_path)
    codec = load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path))
    with pytest.raises(UserError, match=r"5 × 16 × 24 has frames, and AutoencoderKL encodes images; use \[16, 24\]$"):
        codec.latent_shape((5, 16, 24))


WAN = {"class_name": "WanTransformer3DModel", "kwargs": {"patch_size": [1, 2, 2]}}
COGVIDEOX = {"class_name": "CogVideoXTransformer3DModel", "kwargs": {"patch_size": 2, "patch_size_t": 2}}
SANA = {"class_name": "SanaTransformer2DModel", "kwargs": {}}
SD3 = {"class_name": "SD3Transformer2DModel", "kwargs": {"patch_size": 2, "pos_embed_max_size": 16}}


@pytest.mark.parametrize(
    ("model", "shape", "misfits"),
    [
        (WAN, (16, 3, 8, 8), []),
        (WAN, (16, 1, 8, 8), []),
        (WAN, (16, 8, 8), ["without frames, and WanTransformer3DModel generates videos; set [frames, height, width]"]),
        (WAN, (16, 3, 8, 7), ["with 7 columns, and the model's patch size is 2; nearest: 8"]),
        (COGVIDEOX, (16, 4, 8, 8), []),
        (COGVIDEOX, (16, 21, 8, 8), ["with 21 frames, and the model's patch size is 2; nearest: 22"]),
        (SANA, (16, 8, 8), []),
        (SANA, (16, 3, 8, 8), ["with frames, and SanaTransformer2DModel generates images"]),
        (SD3, (16, 32, 32), []),
        (
            SD3,
            (16, 24, 34),
            [
                "and SD3Transformer2DModel takes up to 32 on a side (its pos_embed_max_size × "
                "patch_size); use a smaller size"
            ],
        ),
    ],
)
def test_latents_that_a_model_does_not_take_are_named(model, shape, misfits):
    name = "x".join(map(str, shape))
    commas = ("images", "up to")
    expected = [
        f"latents of {name}{', ' if any(each in misfit for each in commas) else ' '}{misfit}" for misfit in misfits
    ]
    assert size_misfits(ModelSpec(name="x", **model), [shape]) == expected


def test_frames_are_brought_to_size_one_by_one():
    image = Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3))
    _, alone = bucket_pixels(image, [(8, 8)], "rgb")
    _, moving = bucket_pixels(iter([image] * 3), [(3, 8, 8)], "rgb")
    assert (moving == alone[:, None]).all()
