"""Image-to-video models of several families, from files to samples: they are fed what their pipeline makes."""

from types import SimpleNamespace

import diffusers
import pytest
import tiny_pipelines
import tiny_vaes
import torch
from commands import in_process, with_set
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from gpus import benched
from PIL import Image
from tiny_videos import moving_square
from training import encoded_for, train_here

from bigdit import models
from bigdit.config.data import FirstFrameNoise
from bigdit.encoders.latents import bucket_pixels
from bigdit.loader.batch import Batch
from bigdit.loader.stream import BatchReader, FirstFrameChanges
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
    """Its first frame is among its latents, at t = 0."""
    latents = fed["hidden_states"].transpose(1, 2).unflatten(2, (2, 2, 2))
    assert not fed["timestep"][:, :4].any()
    return latents, fed["encoder_attention_mask"], {"image_condition": latents}, fed["timestep"][:, -1]


def of_wan(pipeline, frame):
    image = pipeline.video_processor.preprocess(frame, height=SIDE, width=SIDE)
    _, first, kept = pipeline.prepare_latents(image, 1, 4, SIDE, SIDE, 5, torch.float32, torch.device("cpu"))
    return first * (1 - kept), None


def as_wan(fed):
    """Its first frame is among its latents, at t = 0."""
    assert fed["timestep"].shape == (1, 12)
    assert not fed["timestep"][:, :4].any()
    latents = fed["hidden_states"]
    return latents, None, {"image_condition": latents}, fed["timestep"][:, -1]


# By pipeline: the transformer, the VAE, what it makes of a frame, what it feeds, and what its call gets.
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
    "CogVideoXImageToVideoPipeline of learned positions": SimpleNamespace(  # 5B
        class_name="CogVideoXTransformer3DModel",
        kwargs={
            **{"in_channels": 8, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16},
            **{"num_layers": 2, "time_embed_dim": 8, "text_embed_dim": 16, "max_text_seq_length": 226},
            **{"sample_height": 8, "sample_width": 8, "sample_frames": 7, "temporal_compression_ratio": 2},
            **{"use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": True},
        },
        vae=lambda: tiny_vaes.cogvideox(frames=2, scaling_factor=0.7),
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
    "WanImageToVideoPipeline": SimpleNamespace(  # 2.2 5B
        class_name="WanTransformer3DModel",
        kwargs={
            **{"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12},
            **{"text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2},
        },
        vae=tiny_vaes.wan_22,
        side=SIDE,
        frames=5,
        makes=of_wan,
        feeds=as_wan,
        asked={"height": SIDE, "width": SIDE, "guidance_scale": 1.0},
        parts=lambda: {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "expand_timesteps": True},
        encoder=False,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def encoded(request, tmp_path_factory):
    """The case, the folder of a run over two encoded clips, and its pipeline."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("begins")
    name = request.param.split()[0]
    torch.manual_seed(0)
    vae = case.vae().eval()
    parts = tiny_pipelines.save(folder / "pipeline", name)
    (folder / "clips").mkdir()
    for number in range(2):
        moving_square(folder / f"clips/{number}.mp4", rightwards=number % 2 == 0)
    first_frame = {"pipeline": str(folder / "pipeline")} if case.encoder else {}
    data = {"images": str(folder / "clips"), "buckets": [[case.frames, case.side, case.side]], "fps": 16}
    made_of = {"class_name": case.class_name, "kwargs": case.kwargs}
    encoded_for(folder, made_of, vae, data, first_frame=first_frame)
    made = parts | {"vae": vae, "transformer": getattr(diffusers, case.class_name)(**case.kwargs)} | case.parts()
    return case, folder, tiny_pipelines.pipeline_of(name, made)


def frame_of(folder, number, side):
    """The clip's first frame in its bucket, as extraction has it."""
    _, pixels = bucket_pixels(first_image(folder / f"clips/{number}.mp4"), [(side, side)], "rgb")
    return Image.fromarray(pixels.transpose(1, 2, 0))


def test_batches_are_what_the_pipeline_makes(encoded, monkeypatch):
    """Some pipelines draw from the VAE's distribution; a store has its mode."""
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
    assert batch.extras["image_condition"][0].std() > 0.05


def test_first_frames_are_left_out_or_get_noise_by_the_seed_of_a_sample(encoded):
    _, folder, _ = encoded
    store = FeatureStore.open(folder / "features")
    (shape,), count = store.buckets, 400
    places = torch.tensor([[0] * count, [0] * count]).numpy()

    def read(*changes):
        reader = BatchReader(store, count, 1.0, pinned=False, first_frames=FirstFrameChanges(*changes))
        extras = reader.read(shape, *places, [*range(count)]).extras
        return extras["image_condition"].float(), extras.get("image_embeds")

    (plain, embeds), (dropped, no_embeds), (noisy, same) = read(), read(0.3), read(0.0, FirstFrameNoise(mean=0.0))
    gone = ~dropped.flatten(1).any(dim=1)
    assert 0.2 < gone.float().mean() < 0.4
    assert torch.equal(dropped[~gone], plain[~gone])
    if embeds is not None:
        assert torch.equal(no_embeds.flatten(1).any(dim=1), ~gone)
        assert torch.equal(same, embeds)
    difference = noisy - plain
    channels = store.schema.first_frame["mask"]
    assert not difference[:, :channels].any()
    assert not difference[:, :, 1:].any()
    sigmas = difference[:, channels:, 0].flatten(1).std(dim=1).log()
    assert abs(sigmas.mean()) < 0.1
    assert abs(sigmas.std() - 0.5) < 0.1
    assert torch.equal(noisy, read(0.0, FirstFrameNoise(mean=0.0))[0])


def test_a_step_takes_what_was_predicted_and_the_pipeline_loads_what_was_trained(encoded):
    case, folder, pipeline = encoded
    receipt, _ = benched("--config", folder / "run.yaml")
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    changes = ("data.first_frame_dropout=0.5", "data.first_frame_noise={}", "strategy.micro_batch_size=1")
    train_here(folder / "run.yaml", *changes)
    image = frame_of(folder, 0, case.side)
    image.save(folder / "first.png")
    drawn = in_process("sample", "--checkpoint", folder / "run", "--caption", "a square", "--image",
                       folder / "first.png", "--steps", "2", "--out", folder / "samples")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    done = in_process("export", "--checkpoint", folder / "run", "--out", folder / "exported")
    assert done.returncode == 0, done.stderr
    transformer = getattr(diffusers, case.class_name).from_pretrained(folder / "exported/transformer")
    if case.kwargs.get("use_learned_positional_embeddings"):
        new = getattr(diffusers, case.class_name)(**case.kwargs)
        assert 0 < (transformer.patch_embed.pos_embedding - new.patch_embed.pos_embedding).abs().max() < 0.01
    for parameter in transformer.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    whole = tiny_pipelines.pipeline_of(
        type(pipeline).__name__, pipeline.components | {"transformer": transformer} | case.parts()
    )
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
        if "LTX" in case.class_name:  # its first frame is known
            answer = answer.transpose(1, 2).unflatten(2, (2, 2, 2))
            found, answer = found[:, :, 1:], answer[:, :, 1:]
        elif "Wan" in case.class_name:
            found, answer = found[:, :, 1:], answer[:, :, 1:]
        elif "Cog" in case.class_name:
            answer = answer.transpose(1, 2)
        assert torch.allclose(found, answer, rtol=1e-4, atol=1e-4)
        assert found.std() > 0.01


@pytest.mark.parametrize(
    ("encoded", "settings", "problem"),
    [
        (
            "HunyuanVideo15ImageToVideoPipeline",
            ("data.first_frame_dropout=0.1",),
            "masks the image of a whole micro-batch alone; set it to 0, or strategy.micro_batch_size, 2, to 1",
        ),
        (
            "LTXImageToVideoPipeline",
            ("encoders.first_frame=null", "data.first_frame_noise={}"),
            "data.first_frame_noise is set, and encoders.first_frame is not; leave it out",
        ),
        (
            "LTXImageToVideoPipeline",
            ("encoders.first_frame=null",),
            "it was encoded with first frames, and encoders.first_frame is not set",
        ),
        (
            "CogVideoXImageToVideoPipeline of learned positions",
            ("model.kwargs.sample_frames=9",),
            "and the model has learned positions of 5 × 8 × 8 latents",
        ),
    ],
    indirect=["encoded"],
)
def test_what_does_not_fit_is_refused_in_a_line(encoded, settings, problem):
    _, folder, _ = encoded
    done = in_process("train", "--dry-run", "--config", folder / "run.yaml", *with_set(settings))
    assert done.returncode == 1
    assert problem in " ".join(done.stderr.split()), done.stderr
