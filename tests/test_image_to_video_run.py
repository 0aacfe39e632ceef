"""Image-to-video models of several families, from files to samples: what they are fed is what their pipeline makes."""

from types import SimpleNamespace

import diffusers
import pytest
import tiny_pipelines
import tiny_vaes
import torch
from commands import in_process
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from gpus import benched
from PIL import Image
from tiny_videos import moving_square
from training import encoded_for, train_here

from bigdit import models
from bigdit.encoders.latents import bucket_pixels
from bigdit.loader.batch import Batch
from bigdit.loader.stream import BatchReader
from bigdit.sampling.conditions import first_image
from bigdit.store import FeatureStore

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("image-to-video")]

SIDE = 16


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


def of_cogvideox(pipeline, frame):
    image = pipeline.video_processor.preprocess(frame, height=SIDE, width=SIDE)
    _, latents = pipeline.prepare_latents(image, 1, 4, 7, SIDE, SIDE, torch.float32, torch.device("cpu"))
    return latents.transpose(1, 2), None


def as_cogvideox(fed):
    latents, condition = fed["hidden_states"].transpose(1, 2).split((4, 4), dim=1)
    return latents, None, {"image_condition": condition}, fed["timestep"]


def of_ltx(pipeline, frame):
    image = pipeline.video_processor.preprocess(frame, height=64, width=64)
    latents, kept = pipeline.prepare_latents(image, 1, 4, 64, 64, 9, torch.float32, torch.device("cpu"))
    alone = pipeline._unpack_latents(latents * kept[..., None], 2, 2, 2)
    return alone, None


def as_ltx(fed):
    """Its first frame is among its latents, at a t of 0."""
    latents = fed["hidden_states"].transpose(1, 2).unflatten(2, (2, 2, 2))
    assert not fed["timestep"][:, :4].any()
    return latents, fed["encoder_attention_mask"], {"image_condition": latents}, fed["timestep"][:, -1]


# By pipeline: the transformer, the VAE, what it makes of a frame, what it feeds, and what its call is told.
CASES = {
    "HunyuanVideo15ImageToVideoPipeline": SimpleNamespace(
        class_name="HunyuanVideo15Transformer3DModel",
        kwargs=tiny_pipelines.HUNYUAN_VIDEO_15 | {"target_size": SIDE},
        vae=tiny_vaes.hunyuan_15,
        side=SIDE,
        frames=5,
        makes=of_hunyuan,
        feeds=as_hunyuan,
        asked={},
        parts=lambda: {
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
            "guider": diffusers.ClassifierFreeGuidance(enabled=False),
        },
        encoder=True,
    ),
    "CogVideoXImageToVideoPipeline": SimpleNamespace(  # 1.5, whose latents go in by pairs of frames
        class_name="CogVideoXTransformer3DModel",
        kwargs={
            **{
                "in_channels": 8,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 16,
                "num_layers": 2,
            },
            **{"time_embed_dim": 8, "text_embed_dim": 16, "max_text_seq_length": 226, "ofs_embed_dim": 8},
            **{"sample_height": 300, "sample_width": 300, "use_rotary_positional_embeddings": True},
            **{"patch_size_t": 2, "patch_bias": False},
        },
        vae=lambda: tiny_vaes.cogvideox(frames=2, invert_scale_latents=True, scaling_factor=0.7),
        side=SIDE,
        frames=7,
        makes=of_cogvideox,
        feeds=as_cogvideox,
        asked={"height": SIDE, "width": SIDE, "guidance_scale": 1.0},
        parts=lambda: {
            "scheduler": diffusers.CogVideoXDDIMScheduler(
                prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True
            )
        },
        encoder=False,
    ),
    "LTXImageToVideoPipeline": SimpleNamespace(
        class_name="LTXVideoTransformer3DModel",
        kwargs={
            **{"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8},
            **{"cross_attention_dim": 16, "num_layers": 2, "caption_channels": 16},
        },
        vae=lambda: tiny_vaes.ltx(levels=4, patch=4),  # 8 frames of 32 × 32 pixels, as the published one
        side=2 * 32,
        frames=9,
        makes=of_ltx,
        feeds=as_ltx,
        asked={"height": 64, "width": 64, "frame_rate": 25, "guidance_scale": 1.0},
        parts=lambda: {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)},
        encoder=False,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def encoded(request, tmp_path_factory):
    """The case, the folder of a run over two clips whose features are made, and its pipeline."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("begins")
    torch.manual_seed(0)
    vae = case.vae().eval()
    parts = tiny_pipelines.save(folder / "pipeline", request.param)
    (folder / "clips").mkdir()
    for number in range(2):
        moving_square(folder / f"clips/{number}.mp4", rightwards=number % 2 == 0)
    first_frame = {"pipeline": str(folder / "pipeline")} if case.encoder else {}
    data = {"images": str(folder / "clips"), "buckets": [[case.frames, case.side, case.side]], "fps": 16}
    made_of = {"class_name": case.class_name, "kwargs": case.kwargs}
    encoded_for(folder, made_of, vae, data, first_frame=first_frame)
    made = parts | {"vae": vae, "transformer": getattr(diffusers, case.class_name)(**case.kwargs)} | case.parts()
    return case, folder, tiny_pipelines.pipeline_of(request.param, made)


def frame_of(folder, number, side):
    """As extraction has it: of the clip, in its bucket."""
    _, pixels = bucket_pixels(first_image(folder / f"clips/{number}.mp4"), [(side, side)], "rgb")
    return Image.fromarray(pixels.transpose(1, 2, 0))


def test_batches_are_what_the_pipeline_makes(encoded, monkeypatch):
    """Some draw from the VAE's distribution; a store has its mode."""
    case, folder, pipeline = encoded
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda found, generator=None: found.mode())
    store = FeatureStore.open(folder / "features")
    (shape,) = store.buckets
    batch = BatchReader(store, 2, 1.0, pinned=False).read(shape, *torch.tensor([[0, 0], [1, 0]]).numpy(), [1, 2])
    for place, number in enumerate((1, 0)):
        with torch.no_grad():
            condition, embeds = case.makes(pipeline, frame_of(folder, number, case.side))
        assert torch.equal(batch.extras["image_condition"][place], condition[0].bfloat16())
        assert ("image_embeds" in batch.extras) == (embeds is not None)
        assert embeds is None or torch.equal(batch.extras["image_embeds"][place], embeds[0].bfloat16())
    assert batch.extras["image_condition"][0].std() > 0.1


def test_a_step_takes_what_was_predicted_and_the_pipeline_loads_what_was_trained(encoded):
    case, folder, pipeline = encoded
    receipt, _ = benched("--config", folder / "run.yaml")
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    train_here(folder / "run.yaml")
    image = frame_of(folder, 0, case.side)
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
    whole(image, "a square", num_frames=case.frames, num_inference_steps=2, output_type="latent", **case.asked)
    assert len(calls) == 2
    for fed, answer in list(calls):
        latents, mask, extras, t = case.feeds(fed)
        batch = Batch(latents, fed["encoder_hidden_states"], mask, (0,), extras)
        with torch.no_grad():
            found = family.predict(transformer, latents, t / 1000, batch)
        if "LTX" in case.class_name:  # whose first frame is known
            answer = answer.transpose(1, 2).unflatten(2, (2, 2, 2))
            found, answer = found[:, :, 1:], answer[:, :, 1:]
        elif "Cog" in case.class_name:
            answer = answer.transpose(1, 2)
        assert torch.allclose(found, answer, rtol=1e-4, atol=1e-4)
        assert found.std() > 0.01
