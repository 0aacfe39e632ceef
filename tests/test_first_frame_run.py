"""Video models that start from an image, from files to samples: they are fed what their pipeline makes."""

import copy
import json

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import torch
from commands import in_process, with_set
from gpus import benched
from PIL import Image, ImageOps, ImageSequence
from stores import read_rows
from tiny_sources import gradient
from tiny_vaes import wan
from tiny_videos import moving_square
from training import encoded_for, refusal, train_here

from bigdit.checkpoint import latest
from bigdit.encoders.latents import bucket_pixels
from bigdit.errors import UserError
from bigdit.loader.stream import BatchReader
from bigdit.sampling import Sampler
from bigdit.sampling.conditions import first_image
from bigdit.sampling.grid import stills_png
from bigdit.store import FeatureStore
from bigdit.store.reader import Part

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("videos")]

PIPELINE = "WanImageToVideoPipeline"
SHAPE = (4, 3, 8, 16)  # of 5 frames of 16 × 32 pixels
KWARGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 10,  # latents, two of the mask, latents of the first frame
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "image_dim": 8,
    "added_kv_proj_dim": 24,
}


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """The folder of a run over four encoded clips, and its pipeline without a transformer."""
    folder = tmp_path_factory.mktemp("first")
    torch.manual_seed(0)
    vae = wan(halved=True).eval()
    vae.register_to_config(scale_factor_temporal=2)
    (folder / "pipeline").mkdir()
    parts = tiny_pipelines.save(folder / "pipeline", PIPELINE)
    (folder / "clips").mkdir()
    for number in range(4):
        moving_square(folder / f"clips/{number}.mp4", rightwards=number % 2 == 0)
    data = {"images": str(folder / "clips"), "buckets": [[5, 16, 32]], "fps": 8}
    model = {"class_name": "WanTransformer3DModel", "kwargs": KWARGS}
    encoded_for(folder, model, vae, data, first_frame={"pipeline": str(folder / "pipeline")})
    parts |= {"vae": vae, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    return folder, tiny_pipelines.pipeline_of(PIPELINE, parts)


@torch.no_grad()
def of_pipeline(pipeline, frame):
    """The condition and the embeddings that the pipeline's call makes of an image, in bf16."""
    image = pipeline.video_processor.preprocess(frame, height=frame.height, width=frame.width)
    size = frame.height, frame.width
    _, condition = pipeline.prepare_latents(image, 1, 4, *size, 5, torch.float32, torch.device("cpu"))
    return condition.bfloat16(), pipeline.encode_image(frame, torch.device("cpu")).bfloat16()


def frame_of(path):
    """The file's first frame in its bucket, as extraction has it."""
    _, pixels = bucket_pixels(first_image(path), [(16, 32)], "rgb")
    return Image.fromarray(pixels.transpose(1, 2, 0))


def test_batches_are_what_the_pipeline_makes_to_the_bit(encoded):
    folder, pipeline = encoded
    store = FeatureStore.open(folder / "features")
    assert {name: store.schema.first_frame[name] for name in ("mask", "tokens", "dim")} == {
        "mask": 2, "tokens": 257, "dim": 8,
    }  # fmt: skip
    reader = BatchReader(store, 4, 1.0, pinned=False)  # captions are dropped, first frames are not
    for _ in range(2):  # also in memory that is used again
        batch = reader.read(SHAPE, *torch.tensor([[0, 0, 0, 0], [3, 0, 2, 1]]).numpy(), [1, 2, 3, 4])
        assert set(batch.extras) == {"image_condition", "image_embeds"}
        for place, number in enumerate([3, 0, 2, 1]):
            condition, embeds = of_pipeline(pipeline, frame_of(folder / f"clips/{number}.mp4"))
            assert torch.equal(batch.extras["image_condition"][place], condition[0])
            assert torch.equal(batch.extras["image_embeds"][place], embeds[0])
        assert batch.extras["image_condition"][0].std() > 0.1
        del batch


def covering(image, size):
    """The middle of an image, resized until it covers (width, height)."""
    return ImageOps.fit(image.convert("RGB"), size, Image.Resampling.LANCZOS)


def test_first_frames_of_clips_of_many_sizes_are_cropped_and_mirrored_with_them(encoded, tmp_path):
    folder, pipeline = encoded
    sizes = [(64, 48), (20, 30), (40, 16), (18, 64), (32, 16)]
    (tmp_path / "clips").mkdir()
    for number, (width, height) in enumerate(sizes):
        moving_square(tmp_path / f"clips/{number}.mp4", rightwards=True, side=width, height=height)
    images = f"data.images={{path: {tmp_path}/clips, flip: true}}"
    settings = [images, "data.buckets=[[5, 16, 32], [5, 32, 16]]", f"data.features={tmp_path}/features"]
    done = in_process("extract", "--workers", "1", "--config", folder / "run.yaml", *with_set(settings))
    assert done.returncode == 0, done.stderr
    store = FeatureStore.open(tmp_path / "features")
    found = {}
    for shape, count in store.buckets.items():
        _, _, indices = read_rows(store, shape, range(count))
        batch = BatchReader(store, count, 1.0, pinned=False).read(
            shape, np.zeros(count, int), np.arange(count), [*range(count)]
        )
        for place, index in enumerate(indices):
            first = covering(first_image(tmp_path / f"clips/{index // 2}.mp4"), (2 * shape[-1], 2 * shape[-2]))
            condition, embeds = of_pipeline(pipeline, ImageOps.mirror(first) if index % 2 else first)
            assert torch.equal(batch.extras["image_condition"][place], condition[0])
            assert torch.equal(batch.extras["image_embeds"][place], embeds[0])
            found[index] = shape[-2:]
    wide, high = (8, 16), (16, 8)
    assert [found[index] for index in range(10)] == [wide, wide, high, high, wide, wide, high, high, wide, wide]


def test_a_step_takes_what_was_predicted_and_the_pipeline_loads_what_was_trained(encoded):
    folder, pipeline = encoded
    receipt, _ = benched("--config", folder / "run.yaml")
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    train_here(folder / "run.yaml")
    image = frame_of(folder / "clips/0.mp4")
    image.save(folder / "first.png")
    drawn = in_process("sample", "--checkpoint", folder / "run", "--caption", "a square", "--caption", "two", "--image",
                       folder / "first.png", "--steps", "2", "--out", folder / "samples", "--json")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    for row in json.loads(drawn.stdout)["images"]:
        with Image.open(folder / "samples" / row["file"]) as video:
            assert (video.n_frames, video.size) == (5, (32, 16))
    done = in_process("export", "--checkpoint", folder / "run", "--out", folder / "exported")
    assert done.returncode == 0, done.stderr
    transformer = diffusers.WanTransformer3DModel.from_pretrained(folder / "exported/transformer")
    whole = tiny_pipelines.pipeline_of(PIPELINE, pipeline.components | {"transformer": transformer})
    whole.set_progress_bar_config(disable=True)
    frames = whole(image, "a square", height=16, width=32, num_frames=5, num_inference_steps=2, output_type="np")
    assert frames.frames.shape == (1, 5, 16, 32, 3)


def test_the_pipeline_draws_with_exported_adapters_as_training_would(encoded):
    folder, pipeline = encoded
    torch.manual_seed(1)
    base = diffusers.WanTransformer3DModel(**KWARGS).bfloat16().float()  # rounded, as training loads it
    base.save_pretrained(folder / "base/transformer")
    of_lora = (
        "strategy.lora={rank: 2, alpha: 4}",
        "strategy.precision=bf16",
        "strategy.optimizer.lr=0.05",
        "train.checkpoint_every=2",
    )
    of_base = f"model.init_from={folder / 'base/transformer'}"
    train_here(folder / "run.yaml", *of_lora, of_base, f"output={folder / 'lora'}")
    checkpoint, _ = latest(folder / "lora")
    image = frame_of(folder / "clips/0.mp4")

    def drawn(transformer, adapters=None, file=None):
        whole = tiny_pipelines.pipeline_of(PIPELINE, pipeline.components | {"transformer": transformer})
        whole.set_progress_bar_config(disable=True)
        if adapters is not None:
            whole.load_lora_weights(adapters, weight_name=file)
        asked = {"height": 16, "width": 32, "num_frames": 5, "num_inference_steps": 2, "output_type": "latent"}
        return whole(image, "a square", generator=torch.Generator().manual_seed(0), **asked).frames

    without = drawn(base)
    trained = drawn(Sampler(checkpoint, torch.device("cpu")).model().float())
    exported = folder / "lora/exports/step-00000002/transformer"
    of_comfyui = drawn(copy.deepcopy(base), exported, "comfyui_lora_weights.safetensors")  # diffusers reads it, too
    loaded = drawn(base, exported)
    assert torch.equal(of_comfyui, loaded)
    assert (loaded - trained).norm() < 0.02 * (loaded - without).norm()  # its adapters are rounded, too
    assert (loaded - without).abs().max() > 0.01
    names = {name.rsplit(".lora_", 1)[0].split(".", 1)[1] for name in base.state_dict() if "lora_A" in name}
    assert {name for name in names if "attn2.add_" in name}  # also those that see the image


def test_videos_on_the_way_are_those_that_are_drawn_of_the_checkpoint(encoded):
    """Each begins with its own image, also with guidance."""
    folder, _ = encoded
    for number in range(2):
        frame_of(folder / f"clips/{number}.mp4").save(folder / f"begins-{number}.png")
    asked = (
        f"samples.images=[{folder / 'begins-0.png'}, {folder / 'clips/1.mp4'}]",
        *("samples.captions=[a square, two]", "samples.every=2", "samples.steps=2", "samples.seed=5"),
        *("train.checkpoint_every=2", f"output={folder / 'seen'}"),
    )
    train_here(folder / "run.yaml", *asked)
    with Image.open(folder / "seen/samples/step-00000002.webp") as grid:
        assert grid.n_frames == 5
    images = [part for number in range(2) for part in ("--image", folder / f"begins-{number}.png")]
    drawn = in_process("sample", "--checkpoint", folder / "seen", "--caption", "a square", "--caption", "two", *images,
                       "--steps", "2", "--seed", "5", "--out", folder / "of-checkpoint")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert stills(folder / "of-checkpoint") == (folder / "seen/samples/step-00000002.png").read_bytes()


def stills(folder):
    """The images of frames that a run would make of these two videos."""
    videos = []
    for number in range(2):
        with Image.open(folder / f"{number:05d}.webp") as video:
            frames = [np.asarray(each.convert("RGB")) for each in ImageSequence.Iterator(video)]
        videos.append(np.stack(frames))
    return stills_png(videos, ["a square", "two"])


def test_images_of_other_sizes_and_kinds_begin_videos_as_if_cropped_before(encoded, tmp_path):
    folder, _ = encoded
    train_here(folder / "run.yaml", f"output={tmp_path / 'run'}")
    turned = Image.Exif()
    turned[0x0112] = 6  # shown a quarter turn to the right
    clear = gradient(64, 20, "RGBA")
    clear.putalpha(gradient(64, 20, "L"))
    files = {"gray.png": gradient(30, 50, "L"), "clear.webp": clear, "turned.jpg": gradient(24, 40)}
    files |= {"tiny.gif": gradient(6, 4, "P"), "large.bmp": gradient(600, 500)}
    options = {"turned.jpg": {"exif": turned}, "clear.webp": {"lossless": True, "exact": True}}
    for name, image in files.items():
        image.save(tmp_path / name, **options.get(name, {}))
        with Image.open(tmp_path / name) as read:
            upright = ImageOps.exif_transpose(read).convert("RGBA")
        white = Image.new("RGBA", upright.size, "white")
        covering(Image.alpha_composite(white, upright), (32, 16)).save(tmp_path / f"{name}.cropped.png")

    def drawn(out, names):
        of_each = [part for name in names for part in ("--caption", "a square", "--image", tmp_path / name)]
        done = in_process("sample", "--checkpoint", tmp_path / "run", *of_each, "--steps", "1", "--out", tmp_path / out)
        assert done.returncode == 0, done.stderr
        return [(tmp_path / out / f"{number:05d}.webp").read_bytes() for number in range(len(names))]

    cropped = [f"{name}.cropped.png" for name in files]
    of_files = drawn("of-files", files)
    assert of_files == drawn("of-cropped", cropped)
    others = drawn("of-others", [*cropped[1:], cropped[0]])
    assert all(one != other for one, other in zip(of_files, others, strict=True))


def test_images_to_begin_with_that_cannot_be_read_are_named_before_training(encoded):
    folder, _ = encoded
    asked = ("samples.captions=[a square]", "samples.images=[none.png]", f"output={folder / 'none'}")
    done = in_process("train", "--dry-run", "--config", folder / "run.yaml", *with_set(asked))
    for printed in (" ".join(done.stderr.split()), refusal(folder / "run.yaml", *asked)):
        assert "samples.images: none.png cannot be read: [Errno 2] No such file" in printed
    assert not (folder / "none/metrics.jsonl").exists()


def test_a_store_without_first_frames_is_refused_in_one_line(encoded, tmp_path):
    folder, _ = encoded
    plain = ("encoders.first_frame=null", "model.kwargs.image_dim=null", "model.kwargs.added_kv_proj_dim=null")
    config, store = ("--config", folder / "run.yaml"), f"data.features={tmp_path}"
    done = in_process("extract", "--workers", "1", *config, *with_set([*plain, "model.kwargs.in_channels=4", store]))
    assert done.returncode == 0, done.stderr
    refused = in_process("train", "--dry-run", *config, *with_set([store]))
    assert [" ".join(line.split()) for line in refused.stderr.split("error: ")[1:]] == [
        f"data.features: {tmp_path} does not fit: it was encoded without first frames, and encoders.first_frame is set"
    ]


def test_what_does_not_fit_is_refused(encoded):
    folder, _ = encoded
    config = folder / "run.yaml"
    without = in_process("train", "--config", config, "--set", "encoders.first_frame=null")
    assert without.returncode == 1
    assert "needs the first frame, and encoders.first_frame is missing" in " ".join(without.stderr.split())
    blind = in_process("train", "--config", config, "--set", "encoders.first_frame={}")
    assert "encoders.first_frame.pipeline is missing" in " ".join(blind.stderr.split())
    narrow = in_process("extract", "--config", config, "--set", "encoders.text.max_tokens=64")
    assert "64 states of text, and with an image the model takes 512" in " ".join(narrow.stderr.split())


def test_a_first_frame_whose_bytes_changed_is_named(encoded, tmp_path):
    folder, _ = encoded
    (file,) = (folder / "features").glob("part-*.safetensors")
    copy = tmp_path / file.name
    part = Part.open(file)
    data = bytearray(file.read_bytes())
    column = part.header.columns["first_frame/4x3x8x16"]
    data[column.offset + column.row_bytes + 5] ^= 1
    copy.write_bytes(data)
    assert list(part.damages()) == []
    (problem,) = Part.open(copy).damages()
    assert "is damaged in the first frame of row 1 of 4x3x8x16: its digest differs" in problem
    rooms = {"first_frame": memoryview(bytearray(column.row_bytes)), "image_embeds": memoryview(bytearray(257 * 16))}
    with pytest.raises(UserError, match="first frame of row 1"):
        Part.open(copy).read_frame(SHAPE, 1, rooms)
