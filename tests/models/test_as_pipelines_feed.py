"""A family gives its transformer the inputs that diffusers' pipeline gives it: a call of each pipeline beside a call
of the family."""

import math

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import torch
from PIL import Image
from tiny_pipelines import BRIA, COGVIEW3, COGVIEW4, FLUX, FLUX2, FLUX_CONTROL, LONGCAT_IMAGE, OVIS_IMAGE

from bigdit import models
from bigdit.catalog import FAMILIES
from bigdit.loader.batch import Batch
from bigdit.models.packing import unpack
from bigdit.strategy import ModelSpec

LATENTS = (8, 12)  # of 64 × 96 pixels
EDITED = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8))
MASK = Image.fromarray(np.kron(np.random.default_rng(1).integers(0, 2, (16, 24)), np.ones((4, 4))) * 255).convert("L")
KONTEXT = {"image": EDITED, "max_area": 64 * 96, "_auto_resize": False}
# By pipeline: the transformer and its arguments, its input for t = 1, and further arguments of the pipeline's call.
CASES = {
    "BriaPipeline": ("BriaTransformer2DModel", BRIA, 1000, {}),
    "CogView3PlusPipeline": ("CogView3PlusTransformer2DModel", COGVIEW3, 1000, {}),
    "CogView4Pipeline": ("CogView4Transformer2DModel", COGVIEW4, 1000, {}),
    "LongCatImagePipeline": (  # it draws noise of 16 channels
        "LongCatImageTransformer2DModel",
        LONGCAT_IMAGE | {"in_channels": 64},
        1,
        {"enable_prompt_rewrite": False},
    ),
    "OvisImagePipeline": ("OvisImageTransformer2DModel", OVIS_IMAGE, 1, {}),
    "FluxKontextPipeline": ("FluxTransformer2DModel", FLUX, 1, KONTEXT),
    "FluxControlPipeline": ("FluxTransformer2DModel", FLUX_CONTROL, 1, {"control_image": EDITED}),
    "FluxFillPipeline": (  # 4 + 64 more channels, packed
        "FluxTransformer2DModel",
        FLUX_CONTROL | {"in_channels": 16 + 272},
        1,
        {"image": EDITED, "mask_image": MASK},
    ),
    "Flux2Pipeline": ("Flux2Transformer2DModel", FLUX2, 1, {"image": EDITED}),
}


def scheduler(class_name):
    if class_name == "CogView3PlusPipeline":
        return diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", timestep_spacing="trailing")
    return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def vae(class_name):
    """A VAE whose latent stands for 8 × 8 pixels, as in the published ones."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    blocks |= {"block_out_channels": (4,) * 4, "norm_num_groups": 2, "latent_channels": 4}
    if class_name == "Flux2Pipeline":
        return diffusers.AutoencoderKLFlux2(**blocks).eval()
    return diffusers.AutoencoderKL(shift_factor=0.1, **blocks)


@pytest.mark.parametrize("name", CASES)
def test_the_family_feeds_what_the_pipeline_feeds(name):
    class_name, kwargs, scale, asked = CASES[name]
    torch.manual_seed(0)
    parts = tiny_pipelines.PARTS[name]()
    spec = ModelSpec(name="tiny", class_name=class_name, kwargs=kwargs)
    transformer = models.build(spec, device="cpu", dtype=torch.float32, seed=0)
    for parameter in transformer.parameters():
        parameter.data.normal_(std=0.2)
    pipeline = tiny_pipelines.pipeline_of(
        name, parts | {"vae": vae(name), "transformer": transformer, "scheduler": scheduler(name)}
    )
    pipeline.set_progress_bar_config(disable=True)
    calls = []
    transformer.register_forward_hook(
        lambda module, args, fed, answer: calls.append((fed, answer[0])), with_kwargs=True
    )
    pixels = {"height": 8 * LATENTS[0], "width": 8 * LATENTS[1]}
    pipeline(prompt="a cat", num_inference_steps=2, guidance_scale=1.0, output_type="latent", **pixels, **asked)

    packs, family = FAMILIES[class_name].packs, models.family(class_name)
    assert len(calls) == 2
    for fed, answer in list(calls):
        tokens = fed["hidden_states"]
        own = math.prod(LATENTS) // 4 if packs else None
        given = tokens[:, own:] if "image" in asked else None
        if "control_image" in asked or "mask_image" in asked:
            tokens, given = tokens.split((16, tokens.shape[2] - 16), dim=2)
        latents, answer = (unpack(each[:, :own], *LATENTS) if packs else each for each in (tokens, answer))
        text = fed["encoder_hidden_states"]
        extras = {"pooled_text": fed["pooled_projections"]} if "pooled_text" in FAMILIES[class_name].extras else {}
        if "mask_image" in asked:
            extras["fill"] = unpack(given, *LATENTS)
        elif given is not None:
            extras["reference"] = unpack(given, *LATENTS)[:, None]
        batch = Batch(latents, text, torch.ones(text.shape[:2]), (0,), extras)
        assert latents.shape[2:] == LATENTS
        t = fed["timestep"] / scale
        assert 0 < t.item() <= 1
        with torch.no_grad():
            assert torch.allclose(family.predict(transformer, latents, t, batch), answer, rtol=1e-5, atol=1e-5)
        again, _ = calls.pop()
        positions = [each for each in ("img_ids", "txt_ids") if each in fed]
        for each in ("hidden_states", *positions):
            assert torch.equal(again[each].float(), fed[each].float().view_as(again[each]))
