"""Weights of diffusers' folders: the file's values in the training dtype, without further memory."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bigdit import models
from bigdit.errors import UserError
from bigdit.memory import ledger
from bigdit.record.recorder import Recorder
from bigdit.strategy import ModelSpec

# Its table of positions is a saved buffer. Its other buffers are computed when it is made.
SPEC = ModelSpec(
    name="tiny",
    class_name="SD3Transformer2DModel",
    kwargs={
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 12,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 10,
        "pos_embed_max_size": 8,
    },
)
FILE = "diffusion_pytorch_model.safetensors"
BUFFERS = 8 * 8 * 16 * 4
"""Bytes of the computed table of positions, in fp32."""


def saved(folder, dtype=torch.float32, **how):
    """The folder of a model with weights in `dtype`, and its tensors."""
    made = models.build(SPEC, device="cpu", dtype=torch.float32, seed=0).to(dtype)
    made.save_pretrained(folder, **how)
    return made.state_dict()


def size_of(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": 8000}], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_the_files_in_the_dtype_that_trains(tmp_path, shards, dtype):
    tensors = saved(tmp_path, torch.float16, **shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == (7 if shards else 1)
    loaded = models.load(SPEC, tmp_path, dtype=dtype)
    assert loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    found = loaded.state_dict()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.to(dtype)), name


def test_what_is_in_the_dtype_stays_mapped(tmp_path):
    """It takes no memory of its own, and writes to it do not reach the file."""
    tensors = saved(tmp_path, torch.bfloat16)
    with Recorder() as recorder, recorder.phase("init"):
        model = models.load(SPEC, tmp_path, dtype=torch.bfloat16)
    assert ledger(recorder.host_timeline(), 1).peak_allocated_bytes <= size_of(tensors) + BUFFERS
    maps = Path("/proc/self/maps").read_text()
    assert f"{tmp_path / FILE}\n" in maps
    with torch.no_grad():
        model.proj_out.bias.fill_(3.0)
    assert torch.equal(load_file(tmp_path / FILE)["proj_out.bias"], tensors["proj_out.bias"])


def test_what_is_rounded_is_never_in_fp32(tmp_path):
    """Beside the file's pages there is the model, and no more."""
    tensors = saved(tmp_path, torch.float16)
    with Recorder() as recorder, recorder.phase("init"):
        models.load(SPEC, tmp_path, dtype=torch.bfloat16)
    assert ledger(recorder.host_timeline(), 1).peak_allocated_bytes <= 2 * size_of(tensors) + BUFFERS


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / FILE)
    name = "transformer_blocks.0.norm1.linear.bias"
    save_file(tensors | {name: tensors[name][:1].clone()}, tmp_path / FILE)
    with pytest.raises(UserError, match=rf"does not hold diffusers weights of SD3.*size mismatch for {name}"):
        models.load(SPEC, tmp_path, dtype=torch.float32)


def test_a_folder_that_lacks_tensors_or_has_more_is_of_another_model(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / FILE)
    del tensors["proj_out.bias"]
    save_file(tensors | {"more": torch.zeros(1), "and more": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(UserError, match="of another SD3Transformer2DModel: 1 tensor missing and 2 unexpected"):
        models.load(SPEC, tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(UserError, match="weights of AutoencoderKL, not of SD3Transformer2DModel: 1 tensor missing and"):
        models.load(SPEC, tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    "spoiled", ["no file", "cut off", "index of nothing", "no config", "pickle", "elsewhere", "pipe", "link"]
)
def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, spoiled):
    saved(tmp_path)
    file = tmp_path / FILE
    if spoiled == "no file":
        file.unlink()
    if spoiled == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    if spoiled == "index of nothing":
        (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}}))
    if spoiled in ("pickle", "elsewhere"):
        name = "weights.bin" if spoiled == "pickle" else f"../{tmp_path.name}/{FILE}"
        (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": {"proj_out.bias": name}}))
    if spoiled == "pipe":
        file.unlink()
        os.mkfifo(file)
    if spoiled == "link":
        file.rename(tmp_path.parent / FILE)
        file.symlink_to(tmp_path.parent / FILE)
    if spoiled == "no config":
        (tmp_path / "config.json").unlink()
    with pytest.raises(
        UserError, match=f"^{tmp_path} does not hold diffusers weights of SD3Transformer2DModel: ."
    ) as printed:
        models.load(SPEC, tmp_path, dtype=torch.float32)
    assert "\n" not in str(printed.value)


def test_a_shard_that_is_missing_is_named_before_anything_is_loaded(tmp_path):
    models.build(SPEC, device="cpu", dtype=torch.float32, seed=0).save_pretrained(tmp_path, max_shard_size=8000)
    *_, gone = sorted(tmp_path.glob("*.safetensors"))
    gone.unlink()
    with pytest.raises(UserError, match=rf": its index names \d+ files, and {gone.name} is missing; fetch it again$"):
        models.check_folder(SPEC, tmp_path)
