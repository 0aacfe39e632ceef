"""The catalogue's models: counts, facts, shapes and error texts. torch is not imported."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bigdit.catalog
from bigdit.catalog import FAMILIES, batch_shape, latent_shape, model
from bigdit.catalog.conditions import class_misfits
from bigdit.catalog.families import (
    class_count,
    fills,
    is_controlled,
    no_class,
    takes_classes,
    takes_first_frame,
    training_obstacle,
)
from bigdit.catalog.gpus import gpus
from bigdit.catalog.models import licences, models
from bigdit.catalog.names import load_json
from bigdit.errors import UserError
from bigdit.models import build, families, outline
from bigdit.strategy import BatchShape, ModelSpec

NAMES = [m.name for m in models()]


def test_counts():
    assert len(models()) == 98
    assert len(gpus()) == 80
    assert len(load_json("models.json")["text_encoders"]) == 17


def test_sana_1600m():
    sana = model("sana-1600m-1024")
    assert sana.params == 1_604_462_752
    assert sana.block_lists == (("transformer_blocks", 20),)
    assert (sana.vae.downsample, sana.vae.latent_channels, sana.resolution) == (32, 32, 1024)
    assert sana.trainable
    assert batch_shape(sana) == BatchShape(latents=(32, 32, 32), text=(300, 2304))
    assert batch_shape(sana, 512).latents == (32, 16, 16)


def test_a_sample_of_an_edit_model_has_a_reference():
    for name in ("FLUX.1-Kontext-dev", "FLUX.1-Canny-dev", "FLUX.1-Depth-dev"):
        edits = model(name)
        assert edits.trainable
        assert batch_shape(edits) == batch_shape(model("flux.1-dev")).model_copy(update={"references": 1})


def test_every_model_has_what_a_plan_needs():
    for name in NAMES:
        m = model(name)
        assert m.name == name, name
        assert m.source, name
        assert m.params > 0, name
        assert m.block_lists, name
        assert m.vae.name in load_json("models.json")["vaes"], name
        assert (m.text is None) == (FAMILIES[m.spec.class_name].text_dim is None), name
        assert m.text is None or (m.text.encoder and m.text.dim and m.text.tokens), name
        sample_size = m.spec.kwargs.get("sample_size")
        if sample_size and not m.video:
            assert m.resolution == sample_size * m.vae.downsample, name
        if m.resolution:
            channels, height, width = latent_shape(m, m.resolution, m.resolution)
            assert channels == m.vae.latent_channels, name
            assert height == width == m.resolution // m.vae.downsample, name
            assert height % m.patch_size == 0, name
        # a packed model's input channels are those of the VAE, patch × patch times
        in_channels = m.spec.kwargs.get("out_channels" if is_controlled(m.spec) or fills(m.spec) else "in_channels")
        if in_channels and not m.video:
            assert in_channels in (m.vae.latent_channels, m.vae.latent_channels * m.patch_size**2), name


def test_no_source_points_nowhere():
    text = str(load_json("models.json"))
    assert "find_string" not in text
    assert "from memory" not in text


def test_what_cannot_be_trained_says_why():
    assert {m.spec.class_name for m in models()} == set(FAMILIES)
    assert all(m.trainable for m in models())
    first, both = model("wan2.1-i2v-14b-480p").spec, {"pos_embed_seq_len": 514}
    assert takes_first_frame(first)
    assert training_obstacle(first.model_copy(update={"kwargs": first.kwargs | both})) == (
        "wan2.1-i2v-14b-480p needs the first and the last frame, and a cache keeps only the first"
    )
    mochi = ModelSpec(name="x", class_name="MochiTransformer3DModel", kwargs={"in_channels": 32, "out_channels": 16})
    assert training_obstacle(mochi) == (
        "x begins with an image, which the adapter of MochiTransformer3DModel does not take"
    )
    assert {m.name for m in models() if takes_classes(m.spec)} >= {"dit-xl-2", "dit-xl-2-paper"}
    assert all(m.trainable for m in models() if takes_classes(m.spec))
    assert model("sana-sprint-1600m").trainable
    assert training_obstacle(ModelSpec(name="x", class_name="Mlp", kwargs={})) == "the class Mlp is not known"
    unet = ModelSpec(name="x", class_name="UNet2DConditionModel", kwargs={})
    assert training_obstacle(unet).startswith("the class UNet2DConditionModel is not known: it is a U-Net, and ")
    misspelt = ModelSpec(name="x", class_name="SanaTransformerModel", kwargs={})
    assert training_obstacle(misspelt).startswith(
        "the class SanaTransformerModel is not known; did you mean SanaTransformer2DModel"
    )


@pytest.mark.parametrize("class_name", ["DiTTransformer2DModel", "PaperDiT"])
def test_a_model_knows_as_many_classes_as_its_class_has_it(class_name):
    made = outline(ModelSpec(name="x", class_name=class_name, kwargs={}))
    assert made.config[FAMILIES[class_name].classes] == class_count(
        ModelSpec(name="x", class_name=class_name, kwargs={})
    )
    few = ModelSpec(name="x", class_name=class_name, kwargs={FAMILIES[class_name].classes: 7})
    assert (class_count(few), no_class(few)) == (7, 7)
    assert class_misfits(few, ["a"] * 8) == [f"8 classes, and the model's {FAMILIES[class_name].classes} is 7"]
    assert class_misfits(few, 7) == []


def test_what_is_trained_is_encoded_here_too():
    assert all(m.extractable for m in models())
    dev, klein = model("flux.2-dev"), model("flux.2-klein-9b")
    assert (dev.text_pipeline, klein.text_pipeline) == ("Flux2Pipeline", "Flux2KleinPipeline")
    assert (model("dit-xl-2").text_pipeline, model("dit-xl-2").extractable) == (None, True)
    several = {m.text_pipeline for m in models() if m.extractable and FAMILIES[m.spec.class_name].streams}
    assert several == {
        *("HiDreamImagePipeline", "HunyuanDiTPipeline", "HunyuanImagePipeline", "HunyuanVideo15Pipeline"),
    }


def test_text_is_no_class():
    sana = model("sana-1600m").spec
    assert (takes_classes(sana), no_class(sana)) == (False, None)
    assert class_misfits(sana, 3) == ["classes, and SanaTransformer2DModel takes text"]
    assert no_class(ModelSpec(name="x", class_name="PaperDiT", kwargs={"null_class": False})) is None


def test_the_families_are_those_of_the_adapters():
    assert set(FAMILIES) == set(families())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("sana-1600m", "sana-1600m-1024"),
        ("Sana_1600M_1024", "sana-1600m-1024"),
        ("sana-600m", "sana-600m-1024"),
        ("pixart-sigma", "pixart-sigma-xl-2-1024"),
        ("DiT-XL/2", "dit-xl-2"),
        ("DiT-XL/2-paper", "dit-xl-2-paper"),
        ("FLUX.1-dev", "flux.1-dev"),
        ("flux-schnell", "flux.1-schnell"),
        ("sd3", "sd3-medium"),
    ],
)
def test_model_aliases(written, meant):
    assert model(written).name == meant


def test_unknown_and_ambiguous_models():
    with pytest.raises(UserError, match=r"model 'sana-160m' is not in the catalogue; did you mean .*sana-1600m"):
        bigdit.catalog.model("sana-160m")
    with pytest.raises(UserError, match=r"model 'flux' is ambiguous; name one of flux\.1-dev, flux.1-schnell"):
        model("flux")


def test_pixels_that_do_not_divide():
    message = (
        r"^the height is 500, but sana-1600m-1024 takes multiples of 32 \(VAE 32 × patch 1\); nearest: 480 or 512$"
    )
    with pytest.raises(UserError, match=message):
        latent_shape(model("sana-1600m"), 500, 512)
    with pytest.raises(UserError, match=message.replace("the height", "a side")):  # said once
        latent_shape(model("sana-1600m"), 500, 500)
    with pytest.raises(UserError, match=r"the width is 8, .* multiples of 16 .*; nearest: 16$"):
        latent_shape(model("flux.1-dev"), 1024, 8)
    with pytest.raises(UserError) as both:
        latent_shape(model("flux.1-dev"), 1000, 1001)
    assert len(both.value.problems) == 2


def test_every_model_has_a_native_shape():
    for name in NAMES:
        m = model(name)
        shape = batch_shape(m)
        assert shape.latents[0] == m.vae.latent_channels, name
        assert len(shape.latents) == (4 if m.video else 3), name
        assert (shape.text is None) == (FAMILIES[m.spec.class_name].text_dim is None), name


def test_frames_that_go_into_one_token_are_padded():
    """81 frames are 21 of CogVideoX's latents. CogVideoXPipeline pads them to 22 for 1.5, which takes pairs."""
    assert batch_shape(model("cogvideox1.5-5b")).latents == (16, 22, 96, 170)
    assert latent_shape(model("cogvideox1.5-5b"), 768, 1360, 85) == (16, 22, 96, 170)
    assert batch_shape(model("cogvideox-5b")).latents == (16, 13, 60, 90)


def test_shapes_that_are_not_known():
    with pytest.raises(UserError, match=r"ltx-video-0\.9 is a video model; give the number of frames"):
        latent_shape(model("ltx-video"), 512, 704)
    with pytest.raises(UserError, match="krea2 states no native resolution; give one"):
        batch_shape(model("krea2").model_copy(update={"resolution": None}))
    hunyuan = model("hunyuandit-v1.2")
    text = hunyuan.text.model_copy(update={"tokens": None})
    with pytest.raises(UserError, match=r"the text input of hunyuandit-v1.2 is no single .*CLIP's 77 × 1024"):
        batch_shape(hunyuan.model_copy(update={"text": text}))
    assert batch_shape(model("prx"), 512).latents == (16, 64, 64)
    assert batch_shape(model("dit-xl-2")) == BatchShape(latents=(4, 32, 32), text=None)


@given(st.sampled_from(NAMES), st.integers(-8, 5000), st.integers(-8, 5000))
def test_latents_cover_the_image_or_are_refused(name, height, width):
    m = model(name)
    multiple = m.vae.downsample * m.patch_size
    oblong = m.square and height != width
    if m.video or height < 1 or width < 1 or height % multiple or width % multiple or oblong:
        with pytest.raises(UserError):
            latent_shape(m, height, width)
    else:
        channels, h, w = latent_shape(m, height, width)
        assert (channels, h * m.vae.downsample, w * m.vae.downsample) == (m.vae.latent_channels, height, width)


def test_quick_and_without_torch():
    script = (
        "import sys, time; from bigdit.catalog.models import models; from bigdit.catalog.gpus import gpus\n"
        "start = time.perf_counter(); models(); gpus(); spent = time.perf_counter() - start\n"
        "assert spent < 0.1, spent\nassert 'torch' not in sys.modules and 'diffusers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def built(name):
    """Parameters and lengths of block lists, counted on the meta device."""
    m = model(name)
    made = build(m.spec, device="meta", dtype=torch.float32)
    params = sum(p.numel() for p in made.parameters())
    return params, tuple((attr, len(getattr(made, attr))) for attr, _ in m.block_lists)


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_diffusers(name):
    m = model(name)
    assert built(name) == (m.params, m.block_lists)


def test_each_licence_is_of_repositories_that_the_catalogue_has_each_once():
    named = [repository for licence in licences() for repository in licence.repositories]
    assert len(named) == len(set(named))
    assert set(named) <= set(load_json("models.json")["hub"])


def test_the_positions_of_the_papers_dit_have_one_size():
    with pytest.raises(UserError, match=r"^dit-b-4-paper takes only 256 × 256 pixels: .*; dit-b-4 takes other sizes$"):
        batch_shape(model("dit-b-4-paper"), 512)
    assert batch_shape(model("dit-b-4"), 512).latents == (4, 64, 64)
