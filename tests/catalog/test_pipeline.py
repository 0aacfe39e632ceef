"""A user's folder in diffusers' layout: the VAE's factor, channels and text width are its own, and defaults are
named."""

import json

import pytest
from pipeline_folders import changed, pipeline_folder

from bigdit.catalog import batch_shape, find_model, model, user_model
from bigdit.catalog.families import FAMILIES
from bigdit.emulator.fake_tokenizers import document
from bigdit.errors import UserError
from bigdit.strategy import BatchShape

PIPELINES = {name: entry["model"] for name, entry in document()["repositories"].items() if "model" in entry}


@pytest.mark.parametrize("name", ["Efficient-Large-Model/Sana_1600M_1024px_diffusers", "black-forest-labs/FLUX.1-dev"])
@pytest.mark.parametrize("place", ["", "transformer", "transformer/config.json", "model_index.json"])
def test_a_pipelines_folder_is_a_model_of_its_own(name, place, tmp_path):
    folder, known = pipeline_folder(tmp_path / "mine", name), model(PIPELINES[name])
    found = find_model(str(folder / place))
    assert (found.name, found.spec.class_name, found.pipeline) == ("mine", known.spec.class_name, str(folder))
    assert found.vae.model_copy(update={"source": ""}) == known.vae.model_copy(update={"source": ""})
    assert found.vae.source == str(folder / "vae/config.json")
    assert batch_shape(found) == batch_shape(known)
    assert found.unverified == f"{known.text.tokens} text tokens, taken from {known.name}"


def test_the_vae_is_the_folders_own(tmp_path):
    """A Sana whose VAE halves the sides four times, into 16 channels, with text as wide as T5-large's."""
    folder = pipeline_folder(tmp_path / "small", "Efficient-Large-Model/Sana_600M_512px_diffusers")
    widths = json.loads((folder / "vae/config.json").read_text())["encoder_block_out_channels"]
    changed(folder / "vae/config.json", latent_channels=16, encoder_block_out_channels=widths[:5])
    changed(folder / "transformer/config.json", in_channels=16, caption_channels=1024, sample_size=32)
    changed(folder / "text_encoder/config.json", hidden_size=1024)
    found = find_model(str(folder))
    assert (found.vae.name, found.vae.downsample, found.vae.latent_channels) == ("the VAE of small", 16, 16)
    assert (found.resolution, batch_shape(found, 256)) == (512, BatchShape(latents=(16, 16, 16), text=(300, 1024)))
    assert found.vae.kwargs["latent_channels"] == 16
    assert "VAE" not in found.unverified


def test_what_cannot_go_together_is_refused_with_both_sides(tmp_path):
    folder = pipeline_folder(tmp_path / "odd", "black-forest-labs/FLUX.1-dev")
    changed(folder / "transformer/config.json", joint_attention_dim=4096)  # the class's default is in_channels
    changed(folder / "vae/config.json", latent_channels=4)
    changed(folder / "text_encoder_2/config.json", d_model=2048)
    with pytest.raises(UserError) as error:
        user_model(folder)
    vae, text = error.value.problems
    assert vae == (
        f"{folder}: transformer/config.json has in_channels 64, and vae/config.json gives 16 in patches of 2 × 2 "
        "(latents of 4): they do not fit together"
    )
    assert "joint_attention_dim 4096" in text
    assert "text_encoder/config.json 768, text_encoder_2/config.json 2048" in text
    (folder / "vae/config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    with pytest.raises(UserError, match=r"vae/config.json has no block_out_channels, which AutoencoderKL needs"):
        user_model(folder)


def test_a_text_encoder_that_is_left_out_is_no_contradiction(tmp_path):
    folder = pipeline_folder(tmp_path / "no-t5", "stabilityai/stable-diffusion-3-medium-diffusers")
    changed(folder / "model_index.json", text_encoder_3=[None, None])
    (folder / "text_encoder_3/config.json").unlink()
    assert user_model(folder).text.dim == 4096


def test_a_vae_of_an_unknown_class_is_reported_to_be_assumed(tmp_path):
    folder = pipeline_folder(tmp_path / "own", "Efficient-Large-Model/Sana_600M_512px_diffusers")
    changed(folder / "vae/config.json", _class_name="AutoencoderOfMine")
    unverified = user_model(folder).unverified
    assert unverified == (
        "vae/config.json is of AutoencoderOfMine, which is not known here: the VAE (dc-ae-f32c32-sana, 32 × 32 pixels "
        "a latent) and 300 text tokens, taken from sana-600m-512"
    )


def test_a_vae_whose_arguments_are_no_known_ones_has_no_known_name(tmp_path):
    """CogView4's: the catalogue does not know its arguments."""
    folder = pipeline_folder(tmp_path / "own", "black-forest-labs/FLUX.1-dev")
    changed(folder / "vae/config.json", scaling_factor=0.5)
    assert user_model(folder).vae.name == "the VAE of own"


def test_a_u_net_is_called_one(tmp_path):
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusionXLPipeline", "unet": ["diffusers", "UNet2DConditionModel"]})
    )
    with pytest.raises(
        UserError, match=r"is a StableDiffusionXLPipeline with a UNet2DConditionModel and no transformer"
    ):
        find_model(str(tmp_path))


@pytest.mark.parametrize("name", PIPELINES)
def test_every_repository_that_is_written_is_read_as_its_model(name, tmp_path):
    known = model(PIPELINES[name])
    if known.spec.class_name in FAMILIES:
        found = user_model(pipeline_folder(tmp_path / "copy", name))
        shape = found.vae.downsample, found.vae.temporal_downsample, found.vae.latent_channels
        assert shape == (known.vae.downsample, known.vae.temporal_downsample, known.vae.latent_channels)
        assert found.text == known.text


def test_the_folder_of_an_edit_pipeline_has_references(tmp_path):
    folder = pipeline_folder(tmp_path / "mine", "black-forest-labs/FLUX.1-dev")
    assert find_model(str(folder)).references == 0
    changed(folder / "model_index.json", _class_name="FluxKontextPipeline")
    assert batch_shape(find_model(str(folder))) == batch_shape(model("flux.1-kontext-dev"))


def test_the_folder_of_a_pipeline_with_other_inputs_is_refused_with_the_reason(tmp_path):
    """Their transformers are of the class that makes images from text."""
    folder = pipeline_folder(tmp_path / "mine", "Qwen/Qwen-Image")
    for name, why in (
        ("QwenImageLayeredPipeline", "its input also has images, which bigdit does not support"),
        ("QwenImageEditInpaintPipeline", "it has the weights of another pipeline, and trains none"),
    ):
        changed(folder / "model_index.json", _class_name=name)
        with pytest.raises(UserError, match=f"mine is a {name}: {why}"):
            find_model(str(folder))
