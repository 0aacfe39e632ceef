"""Whole models in one file: the layouts of all classes, and what is written."""

from __future__ import annotations

import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_loras import spec_of

from bigdit import catalog, models
from bigdit.checkpoint import load_model
from bigdit.checkpoint.single_file import write_single_file
from bigdit.models.whole import LAYOUTS

# One of each class. The converters know widths and numbers of blocks, so models keep theirs, with few columns.
NAMES = (
    *("auraflow-v0.1", "chroma1-hd", "flux.1-dev", "flux.2-klein-4b", "hidream-i1", "hunyuanvideo-t2v", "krea2"),
    *("kandinsky-5-t2v-lite", "ltx-video-0.9", "lumina-image-2.0", "mochi-1-preview", "pixart-sigma-xl-2-1024"),
    *("qwen-image", "sd3.5-medium", "wan2.1-i2v-14b-480p", "z-image"),
)
# Lists of diffusers that no file of ComfyUI has.
RENAMED = ("transformer_blocks.", "single_transformer_blocks.", "joint_transformer_blocks.", "time_text_embed.")


@pytest.mark.parametrize("name", NAMES)
def test_diffusers_reads_back_every_number(name):
    spec = catalog.model(name).spec
    shapes = {name: (each.shape[0], *(min(n, 2) for n in each.shape[1:])) for name, each in outline(spec).items()}
    state = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    pieces = models.single_file_layout(spec)
    assert sorted(source for piece in pieces for source in piece.sources) == sorted(state)
    file = {piece.name: piece.of(state) for piece in pieces}
    assert len(file) == len(pieces)
    if LAYOUTS[spec.class_name] and not name.startswith("ltx"):
        assert not [each for each in file if each.startswith(RENAMED)]
    if spec.class_name in SINGLE_FILE_LOADABLE_CLASSES:  # not Kandinsky's and PixArt's
        back = SINGLE_FILE_LOADABLE_CLASSES[spec.class_name]["checkpoint_mapping_fn"](checkpoint=file, config={})
        assert all(torch.equal(back[each], state[each]) for each in state)


def outline(spec):
    return models.outline(spec).state_dict()


def test_all_layouts_are_tried():
    assert {catalog.model(name).spec.class_name for name in NAMES} == LAYOUTS.keys()


def test_pixart_has_the_rows_of_its_project():
    """q, k and v of self-attention are joined, and k and v of cross-attention."""
    pieces = {piece.name: piece for piece in models.single_file_layout(catalog.model("pixart-sigma-xl-2-1024").spec)}
    block = "transformer_blocks.3"
    assert pieces["blocks.3.attn.qkv.bias"].sources == tuple(f"{block}.attn1.to_{each}.bias" for each in "qkv")
    assert pieces["blocks.3.cross_attn.kv_linear.weight"].sources == tuple(
        f"{block}.attn2.to_{each}.weight" for each in "kv"
    )


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_scaled"])
def test_files_are_read_again(tmp_path, kind, monkeypatch):
    """By groups of a few tensors; in bf16 to the bit, in fp8 up to its error, with only linear layers of blocks in
    fp8."""
    monkeypatch.setitem(write_single_file.__globals__, "_AT_ONCE", 1000)
    spec, file = spec_of("wan-t2v"), tmp_path / "wan.safetensors"
    state = models.build(spec, device="cpu", dtype=torch.float32, seed=0).state_dict()
    state["blocks.0.ffn.net.0.proj.weight"] *= 1e4  # beyond fp8's largest, 448
    read = []

    def fill(tensors):
        read.append(len(tensors))
        for name, tensor in tensors.items():
            tensor.copy_(state[name])

    write_single_file(file, kind, models.single_file_layout(spec), {n: t.shape for n, t in state.items()}, {}, fill)
    assert len(read) > 3
    assert sum(read) == len(state)
    found = load_model(spec, file, dtype=torch.bfloat16).state_dict()
    stored = load_file(file)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    for name, tensor in state.items():
        if kind == "bf16":
            assert torch.equal(found[name], tensor.bfloat16())
        else:
            wanted = tensor.clamp(-448, 448) if kind == "fp8" and "ffn.net" in name else tensor
            least = 2**-10 if kind == "fp8" else 2e-3 * wanted.abs().max().item()
            torch.testing.assert_close(found[name].float(), wanted, rtol=0.08, atol=least)
    in_fp8 = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn} - {"scaled_fp8"}
    blocks = {name for name, tensor in stored.items() if name.startswith("blocks.") and tensor.ndim == 2}
    assert in_fp8 == (set() if kind == "bf16" else {name for name in blocks if name.endswith(".weight")})
    scales = {name.removesuffix("scale_weight") + "weight" for name in stored if name.endswith(".scale_weight")}
    assert scales == (in_fp8 if kind == "fp8_scaled" else set())
    assert ("scaled_fp8" in stored) == (kind == "fp8_scaled")
