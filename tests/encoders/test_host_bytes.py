"""CPU memory of encoders: the bytes of loaded ones, predicted from their folders exactly."""

import pytest
import tiny_pipelines
import torch
from tiny_vaes import kl
from torch import nn

from bigdit.config.data import EncodersConfig, FirstFrameConfig, TextEncoderConfig, VaeCodec
from bigdit.encoders.components import load_text_pipeline
from bigdit.encoders.folder import DTYPES
from bigdit.encoders.host_bytes import HostWeights, host_weights
from bigdit.encoders.vae import DiffusersVae
from bigdit.units import gib


def held(*modules):
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "encoder"),
    [("StableDiffusion3Pipeline", "text_encoder_2"), ("Krea2Pipeline", "text_encoder")],  # for three, and for one
)
def test_folders_tell_what_the_loaded_weights_hold(tmp_path, name, encoder, dtype):
    kl().save_pretrained(tmp_path / "vae")
    tiny_pipelines.save(tmp_path, name)
    pipeline = load_text_pipeline(tmp_path, DTYPES[dtype], torch.device("cpu"))
    text = TextEncoderConfig(pipeline=tmp_path, dtype=dtype)
    image = VaeCodec(class_name="AutoencoderKL", path=tmp_path / "vae", dtype=dtype)
    found = host_weights(EncodersConfig(image=image, text=text))
    assert found.text_encoder == held(*(part for part in pipeline.components.values() if isinstance(part, nn.Module)))
    assert found.vae == held(DiffusersVae(image, "cpu", 1)._vae)
    assert found.known == f"text encoder {gib(found.text_encoder)} and VAE {gib(found.vae)}"
    assert (found.known_bytes, found.unknown) == (found.text_encoder + found.vae, None)
    (tmp_path / encoder / "model.safetensors").unlink()  # the others alone would be too few
    assert host_weights(EncodersConfig(image=image, text=text)).unknown == "text encoder"


@pytest.mark.parametrize("text", [{"config": {"d_model": 8}}, {"pipeline": "nowhere"}])
def test_what_has_no_folder_is_not_known(text):
    found = host_weights(EncodersConfig(image={"name": "identity"}, text=TextEncoderConfig(**text)))
    assert found == HostWeights(text_encoder=None, vae=0)
    assert (found.known, found.unknown, found.known_bytes) == (None, "text encoder", 0)
    assert host_weights(EncodersConfig(image={"name": "identity"})).unknown is None  # for a model of classes


def test_what_sees_first_frames_is_counted(tmp_path):
    parts = tiny_pipelines.save(tmp_path, "WanImageToVideoPipeline")
    first = FirstFrameConfig(pipeline=tmp_path)
    found = host_weights(EncodersConfig(image={"name": "identity"}, first_frame=first))
    assert found.image_encoder == found.known_bytes == held(parts["image_encoder"])
    assert found.known == f"image encoder {gib(found.image_encoder)}"
    (tmp_path / "image_encoder/model.safetensors").unlink()
    assert host_weights(EncodersConfig(image={"name": "identity"}, first_frame=first)).unknown == "image encoder"
