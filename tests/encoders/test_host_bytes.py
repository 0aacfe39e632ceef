"""What encoders take of the host: by their folders, what the loaded ones hold, to the byte."""

import pytest
import tiny_pipelines
import torch
from tiny_vaes import kl

from bigdit.config.run import EncodersConfig, TextEncoderConfig, VaeCodec
from bigdit.encoders.components import load_text_pipeline
from bigdit.encoders.folder import DTYPES, weights_bytes
from bigdit.encoders.host_bytes import host_bytes_said, text_bytes
from bigdit.encoders.vae import DiffusersVae
from bigdit.units import gib


def held(*modules):
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_folders_tell_what_the_loaded_weights_hold(tmp_path, dtype):
    kl().save_pretrained(tmp_path / "vae")
    tiny_pipelines.save(tmp_path, "StableDiffusion3Pipeline")  # of three text encoders
    pipeline = load_text_pipeline(tmp_path, DTYPES[dtype], torch.device("cpu"))
    text = TextEncoderConfig(pipeline=tmp_path, dtype=dtype)
    assert text_bytes(text) == held(pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3)
    image = VaeCodec(class_name="AutoencoderKL", path=tmp_path / "vae", dtype=dtype)
    assert weights_bytes(image.path, dtype) == held(DiffusersVae(image, "cpu", 1)._vae)
    said = host_bytes_said(EncodersConfig(image=image, text=text))
    assert said == f"text encoder {gib(text_bytes(text))} and VAE {gib(weights_bytes(image.path, dtype))}"


def test_what_has_no_folder_is_not_known(tmp_path):
    made_up = TextEncoderConfig(config={"d_model": 8})
    assert text_bytes(made_up) is None
    assert text_bytes(TextEncoderConfig(pipeline=tmp_path)) is None
    assert host_bytes_said(EncodersConfig(image={"name": "identity"}, text=made_up)) is None
