"""Weights in one file, or in a variant: the model gets them, or the error says what the file is."""

from __future__ import annotations

import re

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from tiny_loras import spec_of

from bigdit import models
from bigdit.checkpoint import load_model
from bigdit.encoders.folder import load_from
from bigdit.errors import UserError

WAN = spec_of("wan-t2v")
# The names of Wan's own project: diffusers' -> Wan's.
ORIGINAL = [
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    (r"^scale_shift_table", "head.modulation"),
    ("^proj_out", "head.head"),
    ("scale_shift_table", "modulation"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    (r"to_out\.0", "o"),
    (r"to_([qkv])", r"\1"),
    (r"ffn\.net\.0\.proj", "ffn.0"),
    (r"ffn\.net\.2", "ffn.2"),
    (r"\bnorm2\b", "norm3"),
]


def original(name):
    for here, there in ORIGINAL:
        name = re.sub(here, there, name)
    return name


@pytest.fixture(scope="module")
def wan():
    return models.build(WAN, device="cpu", dtype=torch.float32, seed=0).state_dict()


def loaded(source, spec=WAN, dtype=torch.float32):
    found = load_model(spec, source, dtype=dtype).state_dict()
    models.check_folder(spec, source)  # it fits by its header alone, too
    return found


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusers"])
def test_names_of_the_project_of_comfyui_and_of_diffusers(tmp_path, wan, prefix):
    """A file may hold a VAE, too."""
    named = {name if prefix == "diffusers" else prefix + original(name): tensor for name, tensor in wan.items()}
    more = {"vae.decoder.conv1.weight": torch.ones(1)} if prefix.endswith(".") else {}
    save_file(named | more, tmp_path / "wan.safetensors")
    found = loaded(tmp_path / "wan.safetensors")
    assert found.keys() == wan.keys()
    assert all(torch.equal(found[name], wan[name]) for name in wan)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "ema.", "transformer."])
def test_names_of_a_wrapped_model_are_read_where_only_one_is_there(tmp_path, wan, wrapper):
    save_file({wrapper + name: tensor for name, tensor in wan.items()}, tmp_path / "wan.safetensors")
    found = loaded(tmp_path / "wan.safetensors")
    assert all(torch.equal(found[name], wan[name]) for name in wan)
    both = {f"{each}{name}": tensor.clone() for name, tensor in wan.items() for each in (wrapper, "other.")}
    save_file(both, tmp_path / "wan.safetensors")
    with pytest.raises(UserError, match=f"unexpected, the first {min(both)}"):
        loaded(tmp_path / "wan.safetensors")


def test_a_part_of_the_weights_leads_to_its_folder(tmp_path, wan):
    models.build(WAN, device="cpu", dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="10KB")
    part = min(tmp_path.glob("*-of-*.safetensors"))
    with pytest.raises(UserError, match=f"{part} holds a part of the weights; name its folder {tmp_path}$"):
        loaded(part)


@pytest.mark.parametrize("scale", ["scale_weight", "weight_scale", None])
def test_weights_in_fp8_are_multiplied_by_their_scales(tmp_path, wan, scale):
    tensors = {}
    for name, tensor in wan.items():
        if name.endswith(".weight") and ".ffn." in name:
            factor = tensor.abs().max() / 448 if scale else torch.tensor(1.0)
            tensors[original(name)] = (tensor / factor).to(torch.float8_e4m3fn)
            if scale:
                tensors[f"{original(name).removesuffix('weight')}{scale}"] = factor
        else:
            tensors[original(name)] = tensor
    if scale:
        tensors["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "wan_fp8.safetensors")
    found = loaded(tmp_path / "wan_fp8.safetensors", dtype=torch.bfloat16)
    for name, tensor in wan.items():
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name].float(), tensor, rtol=0.08, atol=2e-3)


@pytest.mark.parametrize("variant", ["bf16", "fp16"])
@pytest.mark.parametrize("size", ["5GB", "10KB"])
def test_variants_are_read(tmp_path, wan, variant, size):
    model = models.build(WAN, device="cpu", dtype=torch.float32, seed=0).half().bfloat16()
    model.save_pretrained(tmp_path, variant=variant, max_shard_size=size)
    assert not (tmp_path / "diffusion_pytorch_model.safetensors").exists()
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "10KB")
    assert all(torch.equal(each.float(), model.state_dict()[name].float()) for name, each in loaded(tmp_path).items())


def test_variants_of_encoders_are_read(tmp_path):
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
    )
    vae.save_pretrained(tmp_path, variant="fp16")
    found = load_from(diffusers.AutoencoderKL, "encoders.image.path", tmp_path)
    assert all(torch.equal(each, vae.state_dict()[name]) for name, each in found.state_dict().items())


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("wan.gguf", b"GGUF", "wan.gguf is a GGUF file, whose quantised weights bigdit does not read; take the .safet"),
        ("wan.bin", b"PK", "wan.bin is a pickle, which may run any code; take the .safetensors of it"),
        ("wan.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("wan.safetensors", b"\x08", "wan.safetensors is no safetensors file, or is cut off"),
        ("wan.safetensors", b"GGUF\3\0\0\0", "wan.safetensors is a GGUF file, whose quantised weights bigdit does not"),
        ("wan.safetensors", b"PK\3\4", "wan.safetensors is a pickle, which may run any code; take the .safetensors"),
        ("wan.safetensors", b"<!DOCTYPE html>", "wan.safetensors is a page of the web; take the .safetensors of it"),
        (
            "wan.safetensors.index.json",
            b"{}",
            "wan.safetensors.index.json names the files of weights; name its folder ",
        ),
    ],
)
def test_files_are_named_for_what_they_are(tmp_path, name, content, what):
    """Alone, and in a folder of diffusers."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"^model.init_from: .*{re.escape(what)}"):
        loaded(tmp_path / name)
    if name.endswith((".gguf", ".bin")):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(UserError, match=f"it has no diffusion_pytorch_model.safetensors; {re.escape(what)}"):
            loaded(tmp_path)


@pytest.mark.parametrize(
    ("name", "more", "what"),
    [
        ("wan-t2v", {}, "of another WanTransformer3DModel: .* missing and 1 unexpected, the first some.weight"),
        (
            "wan-t2v",
            {"blocks.0.lora_A.weight": torch.ones(2)},
            "some.safetensors holds a LoRA; name it in model.lora_f",
        ),
        ("flux", {}, "diffusers finds none of it there, or other .*; its first tensor is some.weight; take a folder"),
        ("hunyuan-image", {}, "diffusers converts no single file of HunyuanImageTransformer2DModel; take its folder"),
        (
            "wan-t2v",
            {"q.weight": torch.ones(2).byte(), "q.weight_scale": torch.ones(1)},
            "q.weight is quantised in uint8",
        ),
        ("flux", {"q.weight": torch.ones(2).char()}, "q.weight is quantised in int8; fp8, 16 and 32 bits are read"),
    ],
)
def test_a_file_of_something_else_is_said_so(tmp_path, name, more, what):
    save_file({"some.weight": torch.ones(2)} | more, tmp_path / "some.safetensors")
    with pytest.raises(UserError, match=what):
        loaded(tmp_path / "some.safetensors", spec_of(name))


def test_a_file_that_lacks_some_of_the_models_own_tensors_says_how_many(tmp_path):
    whole = models.build(spec_of("flux"), device="cpu", dtype=torch.float32, seed=0).state_dict()
    save_file(dict([*whole.items()][1:]), tmp_path / "some.safetensors")
    with pytest.raises(UserError, match="weights of another FluxTransformer2DModel: 1 tensor missing and 0 unexpected"):
        loaded(tmp_path / "some.safetensors", spec_of("flux"))
