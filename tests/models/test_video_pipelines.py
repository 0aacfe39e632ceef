"""Video families as their diffusers pipelines drive them: the same videos from the same noise, text and steps."""

import itertools
import json
from pathlib import Path

import diffusers
import pytest
import tiny_vaes
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from bigdit import models, objectives
from bigdit.loader.batch import Batch
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import ModelSpec
from bigdit.train.step import loss_mask

TINY = json.loads((Path(__file__).parent / "tiny_video.json").read_text())
STEPS = 2
SHOWN = 3  # tokens of a caption, and of the padded one


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def mochi(model, noise, text, mask):
    pipeline = diffusers.MochiPipeline(
        FlowMatchEulerDiscreteScheduler(invert_sigmas=True), None, None, None, transformer=model
    )
    asked = {"height": 8 * noise.shape[3], "width": 8 * noise.shape[4], "num_frames": 13}
    video = pipeline(**asked, prompt_embeds=text, prompt_attention_mask=mask.bool(), **as_asked(noise)).frames
    return video, 1 - pipeline.scheduler.sigmas, {}


def hunyuan_video_15(model, noise, text, mask):
    guider, vae = diffusers.ClassifierFreeGuidance(enabled=False), tiny_vaes.hunyuan_15()
    parts = {"text_encoder": None, "tokenizer": None, "text_encoder_2": None, "tokenizer_2": None, "guider": guider}
    pipeline = diffusers.HunyuanVideo15Pipeline(
        transformer=model, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(), **parts
    )
    glyphs, shown = drawn(1, 7, model.config.text_embed_2_dim), torch.ones(1, 7)
    shown[:, 2:] = 0
    asked = as_asked(noise)
    del asked["guidance_scale"]  # its guider's
    video = pipeline(
        prompt_embeds=text, prompt_embeds_mask=mask, prompt_embeds_2=glyphs, prompt_embeds_mask_2=shown, **asked
    ).frames
    return video, pipeline.scheduler.sigmas, {"glyph_text": glyphs, "glyph_text_mask": shown}


def kandinsky_5(model, noise, text, mask):
    parts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    vae = tiny_vaes.hunyuan(levels=4)  # eight pixels a side
    pipeline = diffusers.Kandinsky5T2VPipeline(
        transformer=model, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(), **parts
    )
    _, channels, frames, height, width = noise.shape
    pooled, asked = drawn(1, model.config.in_text_dim2), as_asked(noise)
    beside = torch.zeros(1, frames, height, width, channels + 1)
    asked["latents"] = torch.cat([noise.permute(0, 2, 3, 4, 1), beside], dim=-1)
    video = pipeline(
        **asked,
        **{"height": 8 * height, "width": 8 * width, "num_frames": 4 * frames - 3},
        prompt_embeds_qwen=text[:, :SHOWN],
        prompt_embeds_clip=pooled,
        prompt_cu_seqlens=torch.tensor([0, SHOWN]),
    ).frames
    return video.permute(0, 4, 1, 2, 3), pipeline.scheduler.sigmas, {"pooled_text": pooled}


def as_asked(noise):
    """Arguments of all pipelines: these latents, so many steps, no guidance, and latents as output."""
    return {"latents": noise, "num_inference_steps": STEPS, "guidance_scale": 1.0, "output_type": "latent"}


# By name in tiny_video.json: the pipeline's latents, its times from noise, 1, to video, 0, and further inputs.
PIPELINES = {"hunyuan-video-1.5": hunyuan_video_15, "kandinsky-5": kandinsky_5, "mochi": mochi}


def made(name):
    """The family and a small model of it with random weights, also where they begin as zeros."""
    spec = ModelSpec(name=name, class_name=TINY[name]["class_name"], kwargs=TINY[name]["kwargs"])
    model = models.build(spec, device="cpu", dtype=torch.float32, seed=0).eval()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return models.family(spec.class_name), model


@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipeline_draws_what_the_predicted_velocities_lead_to(name):
    tiny, (family, model) = TINY[name], made(name)
    latents, text = drawn(1, *tiny["latents"]), drawn(1, *tiny["text"])
    mask = (torch.arange(text.shape[1]) < SHOWN)[None].float()
    expected, times, extras = PIPELINES[name](model, latents, text, mask)
    with torch.no_grad():
        for now, then in itertools.pairwise(times):
            batch = Batch(latents, text * mask[..., None], mask, (), extras)
            latents = latents + (then - now) * family.predict(model, latents, now[None], batch)
    assert len(times) == STEPS + 1
    assert torch.allclose(latents, expected, atol=1e-4)
    assert not torch.allclose(latents, drawn(1, *tiny["latents"]), atol=0.1)


@pytest.mark.parametrize("name", [*PIPELINES, "cogview4"])
def test_padding_and_the_other_captions_of_a_batch_change_nothing(name):
    """Captions of 2 and of 5 tokens together give the results of each alone."""
    tiny, (family, model) = TINY[name], made(name)
    latents, text, t = drawn(2, *tiny["latents"]), drawn(2, *tiny["text"]), torch.tensor([0.2, 0.9])
    lengths = (2, text.shape[1])
    shown = torch.stack([(torch.arange(text.shape[1]) < length).float() for length in lengths])
    extras = {extra: drawn(2, *each.shape) for extra, each in family.extras(model).items()}
    extras |= {extra: torch.ones_like(each) for extra, each in extras.items() if extra.endswith("_mask")}
    with torch.no_grad():
        together = family.predict(model, latents, t, Batch(latents, text * shown[..., None], shown, (), extras))
        for i, length in enumerate(lengths):
            one = slice(i, i + 1)
            own = Batch(
                latents[one],
                text[one, :length],
                shown[one, :length],
                (),
                {key: each[one] for key, each in extras.items()},
            )
            assert torch.allclose(family.predict(model, latents[one], t[one], own), together[one], atol=1e-5)


@pytest.mark.parametrize("name", ["ltx", "wan-t2v"])
def test_nothing_is_learned_of_a_first_frame_that_is_given(name):
    """Its predicted velocity leads to it exactly. The loss is the mean over the other frames."""
    tiny, (family, model) = TINY[name], made(name)
    latents, text = drawn(2, *tiny["latents"]), drawn(2, *tiny["text"])
    begun = {"image_condition": torch.cat([latents[:, :, :1], torch.zeros_like(latents[:, :, 1:])], dim=2)}
    batch = Batch(latents, text, torch.ones(text.shape[:2]), (1, 2), begun)
    seen = []

    def predict(noisy, t):
        seen.append((noisy, t, family.predict(model, noisy, t, batch)))
        return seen[-1][2]

    tokens = family.tokens(model, latents.shape)
    fed = FlowMatchingSpec(), predict, latents, batch.seeds, torch.float32, tokens
    with torch.no_grad():
        loss = objectives.loss(*fed, mask=loss_mask(family, batch))
        ((noisy, t, found),) = seen
        t = t.view(-1, 1, 1, 1, 1)
        error = found - ((noisy - (1 - t) * latents) / t - latents)
        other = batch.extras | {"image_condition": begun["image_condition"] * 2}
        moved = family.predict(model, noisy, t.flatten(), Batch(latents, text, batch.text_mask, (1, 2), other))
    assert error[:, :, 0].abs().max() < 1e-3
    assert torch.allclose(loss, error[:, :, 1:].square().mean(), rtol=1e-4)
    assert not torch.allclose(moved[:, :, 1:], found[:, :, 1:])  # the others see it


@pytest.mark.parametrize("name", ["ltx", "wan-t2v"])
def test_a_sample_whose_first_frame_was_left_out_is_one_from_text(name):
    tiny, (family, model) = TINY[name], made(name)
    latents, text, t = drawn(2, *tiny["latents"]), drawn(2, *tiny["text"]), torch.tensor([0.3, 0.8])
    given = torch.cat([drawn(2, *tiny["latents"])[:, :, :1], torch.zeros_like(latents[:, :, 1:])], dim=2)
    mask = torch.ones(text.shape[:2])
    begun, none = ({"image_condition": each} for each in (given, given * torch.tensor([1, 0]).view(-1, 1, 1, 1, 1)))
    with torch.no_grad():
        first, mixed, plain = (
            family.predict(model, latents, t, Batch(latents, text, mask, (), extras)) for extras in (begun, none, {})
        )
    assert torch.allclose(mixed[0], first[0], atol=1e-5)
    assert torch.allclose(mixed[1], plain[1], atol=1e-5)
    assert not torch.allclose(first[1], plain[1], atol=1e-3)
    weights = loss_mask(family, Batch(latents, text, mask, (), none))
    assert weights[:, :, 0, 0].tolist() == [[0, 1.5, 1.5], [1, 1, 1]]


@pytest.mark.parametrize("name", ["ltx", "wan-t2v"])
def test_an_image_is_not_its_own_first_frame(name):
    (family, model), text = made(name), drawn(1, *TINY[name]["text"])
    latents, mask = drawn(1, 4, 1, 4, 6), torch.ones(1, text.shape[1])
    begun = Batch(latents, text, mask, (), {"image_condition": latents})
    with torch.no_grad():
        found = [
            family.predict(model, latents, torch.ones(1), each) for each in (begun, Batch(latents, text, mask, (), {}))
        ]
    assert torch.equal(*found)
    assert loss_mask(family, begun) is None
