"""Files that a clone without `git lfs pull` lacks: each reader names the file and the command that fetches it."""

import re

import pytest
import tiny_pipelines
import torch
from diffusers import AutoencoderKL
from tiny_sources import opened, save

from bigdit import models
from bigdit.checkpoint.pipeline import part_problem
from bigdit.config.data import TextEncoderConfig, VaeCodec
from bigdit.encoders.load import load_image_codec, load_text_encoder
from bigdit.errors import UserError
from bigdit.sources.protocol import Unusable
from bigdit.strategy import ModelSpec

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 132\n"
SAID = "is a Git LFS pointer, not the file: run `git lfs pull`"
SPEC = ModelSpec(
    name="tiny",
    class_name="SanaTransformer2DModel",
    kwargs={
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 12,
        "sample_size": 8,
    },
)


@pytest.mark.parametrize(
    ("name", "printed"), [("a.png", f"image {SAID}"), ("a.txt", f"caption a.txt {SAID}"), ("a.mp4", f"video {SAID}")]
)
def test_of_a_folder_of_images(tmp_path, name, printed):
    save(tmp_path / "a.png")
    if name == "a.mp4":
        (tmp_path / "a.png").unlink()
    (tmp_path / name).write_bytes(POINTER)
    data = {"buckets": [(1, 8, 8)], "fps": 8} if name == "a.mp4" else {}
    (item,) = opened(str(tmp_path), **data).items(0, 1)
    with pytest.raises(Unusable, match=f"^{re.escape(printed)}$"):
        list(item.load().image)


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl", "a.parquet", "a.tar"])
def test_of_a_table_or_a_tar(tmp_path, name):
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(UserError, match=f"^data.images: {tmp_path}/{name} {re.escape(SAID)}"):
        opened(str(tmp_path / name), tmp_path / "features")


def test_of_weights_and_tokenizers(tmp_path):
    weights = "diffusion_pytorch_model.safetensors"
    models.build(SPEC, device="cpu", dtype=torch.float32, seed=0).save_pretrained(tmp_path / "transformer")
    AutoencoderKL(block_out_channels=(32,)).save_pretrained(tmp_path / "vae")
    tiny_pipelines.save(tmp_path, "WanPipeline")

    def read(folder):
        raise UserError(part_problem(tmp_path / folder))

    readers = [
        (f"transformer/{weights}", lambda: models.load(SPEC, tmp_path / "transformer", dtype=torch.float32)),
        (f"vae/{weights}", lambda: load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path / "vae"))),
        ("text_encoder/model.safetensors", lambda: load_text_encoder(TextEncoderConfig(pipeline=tmp_path))),
        ("tokenizer/tokenizer.json", lambda: load_text_encoder(TextEncoderConfig(pipeline=tmp_path))),
        ("text_encoder/model.safetensors", lambda: read("text_encoder")),
        ("tokenizer/tokenizer.json", lambda: read("tokenizer")),
    ]
    for name, reader in readers:
        file = tmp_path / name
        whole = file.read_bytes() if file.exists() else b""
        file.write_bytes(POINTER)
        with pytest.raises(UserError, match=f"{tmp_path}/{name} {re.escape(SAID)}$"):
            reader()
        file.write_bytes(whole)
