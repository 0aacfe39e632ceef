"""Image-to-video models of several families, from files to samples: what they are fed is what their pipeline makes."""

from types import SimpleNamespace

import diffusers
import pytest
import tiny_pipelines
import tiny_vaes
import torch
import yaml
from commands import in_process
from gpus import benched
from PIL import Image
from tiny_videos import moving_square
from training import train_here

from bigdit import models
from bigdit.encoders.latents import bucket_pixels
from bigdit.loader.batch import Batch
from bigdit.loader.stream import BatchReader
from bigdit.sampling.conditions import first_image
from bigdit.store import FeatureStore

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("image-to-video")]

SIDE, FRAMES = 16, 5


def of_hunyuan(pipeline, frame):
    """The condition, mask first, and the embeddings of a frame."""
    noise = torch.zeros(1, 4, 2, 4, 4)
    latents, mask = pipeline.prepare_cond_latents_and_mask(noise, frame, 1, SIDE, SIDE, torch.float32, "cpu")
    return torch.cat([mask, latents], dim=1), pipeline.encode_image(frame, 1, "cpu", torch.float32)


def as_hunyuan(fed):
    """The latents, the extras and t of a call of the transformer."""
    latents, condition, mask = fed["hidden_states"].split((4, 4, 1), dim=1)
    extras = {
        "glyph_text": fed["encoder_hidden_states_2"],
        "glyph_text_mask": fed["encoder_attention_mask_2"],
        "image_condition": torch.cat([mask, condition], dim=1),
        "image_embeds": fed["image_embeds"],
    }
    return latents, fed["encoder_attention_mask"], extras, fed["timestep"]


# By pipeline: the transformer, the VAE, what it makes of a frame, what it feeds, and what its call is told.
CASES = {
    "HunyuanVideo15ImageToVideoPipeline": SimpleNamespace(
        class_name="HunyuanVideo15Transformer3DModel",
        kwargs=tiny_pipelines.HUNYUAN_VIDEO_15 | {"target_size": SIDE},
        vae=tiny_vaes.hunyuan_15,
        makes=of_hunyuan,
        feeds=as_hunyuan,
        asked={},
        parts=lambda: {
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
            "guider": diffusers.ClassifierFreeGuidance(enabled=False),
        },
        encoder=True,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def encoded(request, tmp_path_factory):
    """The case, the folder of a run over two clips whose features are made, and its pipeline without a transformer."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("begins")
    torch.manual_seed(0)
    vae = case.vae().eval()
    vae.save_pretrained(folder / "pipeline/vae")
    parts = tiny_pipelines.save(folder / "pipeline", request.param)
    (folder / "clips").mkdir()
    for number in range(2):
        moving_square(folder / f"clips/{number}.mp4", rightwards=number % 2 == 0)
    first_frame = {"pipeline": str(folder / "pipeline")} if case.encoder else {}
    config = {
        "model": {"class_name": case.class_name, "kwargs": case.kwargs},
        "data": {
            "images": str(folder / "clips"),
            "features": str(folder / "features"),
            "buckets": [[FRAMES, SIDE, SIDE]],
            "fps": 8,
        },
        "encoders": {
            "image": {"name": "vae", "class_name": type(vae).__name__, "path": str(folder / "pipeline/vae")},
            "text": {"pipeline": str(folder / "pipeline")},
            "first_frame": first_frame,
        },
        "strategy": {"micro_batch_size": 2, "precision": "fp32"},
        "train": {"steps": 2},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = in_process("extract", "--config", folder / "run.yaml")
    assert done.returncode == 0, done.stderr
    return case, folder, tiny_pipelines.pipeline_of(request.param, parts | {"vae": vae} | case.parts())


def frame_of(folder, number):
    """As extraction has it: of the clip, in its bucket."""
    _, pixels = bucket_pixels(first_image(folder / f"clips/{number}.mp4"), [(SIDE, SIDE)], "rgb")
    return Image.fromarray(pixels.transpose(1, 2, 0))


def test_batches_are_what_the_pipeline_makes(encoded):
    case, folder, pipeline = encoded
    store = FeatureStore.open(folder / "features")
    (shape,) = store.buckets
    batch = BatchReader(store, 2, 1.0, pinned=False).read(shape, *torch.tensor([[0, 0], [1, 0]]).numpy(), [1, 2])
    for place, number in enumerate((1, 0)):
        with torch.no_grad():
            condition, embeds = case.makes(pipeline, frame_of(folder, number))
        assert torch.equal(batch.extras["image_condition"][place], condition[0].bfloat16())
        assert ("image_embeds" in batch.extras) == (embeds is not None)
        assert embeds is None or torch.equal(batch.extras["image_embeds"][place], embeds[0].bfloat16())
    assert batch.extras["image_condition"][0].std() > 0.1


def test_a_step_takes_what_was_predicted_and_the_pipeline_loads_what_was_trained(encoded):
    case, folder, pipeline = encoded
    receipt, _ = benched("--config", folder / "run.yaml")
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    train_here(folder / "run.yaml")
    image = frame_of(folder, 0)
    image.save(folder / "first.png")
    drawn = in_process("sample", "--checkpoint", folder / "run", "--caption", "a square", "--image",
                       folder / "first.png", "--steps", "2", "--out", folder / "samples")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    done = in_process("export", "--checkpoint", folder / "run", "--out", folder / "exported")
    assert done.returncode == 0, done.stderr
    transformer = getattr(diffusers, case.class_name).from_pretrained(folder / "exported/transformer")
    for parameter in transformer.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    whole = tiny_pipelines.pipeline_of(type(pipeline).__name__, pipeline.components | {"transformer": transformer})
    whole.set_progress_bar_config(disable=True)
    calls, family = [], models.family(case.class_name)
    transformer.register_forward_hook(
        lambda module, args, fed, answer: calls.append((fed, answer[0])), with_kwargs=True
    )
    whole(image, "a square", num_frames=FRAMES, num_inference_steps=2, output_type="latent", **case.asked)
    assert len(calls) == 2
    for fed, answer in list(calls):
        latents, mask, extras, t = case.feeds(fed)
        batch = Batch(latents, fed["encoder_hidden_states"], mask, (0,), extras)
        with torch.no_grad():
            found = family.predict(transformer, latents, t / 1000, batch)
        assert torch.allclose(found, answer, rtol=1e-4, atol=1e-4)
        assert found.std() > 0.01
