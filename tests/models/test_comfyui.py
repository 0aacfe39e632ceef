"""Adapters as ComfyUI reads them: its names of layers, its joined layers, and its scales of DoRA.

ComfyUI adds B·A to a weight. With `dora_scale` it makes (W + B·A) · dora_scale / ‖W‖ by rows.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tiny_loras import SPEC, spec_of, trained

from bigdit import models
from bigdit.errors import UserError
from bigdit.models import comfyui


def of(parent, layers):
    return [f"{parent}.{each}" for each in layers.split()]


_DOUBLE = {
    "diffusion_model.double_blocks.0.img_attn.qkv": of("transformer_blocks.0.attn", "to_q to_k to_v"),
    "diffusion_model.double_blocks.0.img_attn.proj": ["transformer_blocks.0.attn.to_out.0"],
    "diffusion_model.double_blocks.0.txt_attn.qkv": of("transformer_blocks.0.attn", "add_q_proj add_k_proj add_v_proj"),
    "diffusion_model.double_blocks.0.txt_mlp.2": ["transformer_blocks.0.ff_context.net.2"],
}
_SINGLE = {
    "diffusion_model.single_blocks.0.linear1": of(
        "single_transformer_blocks.0", "attn.to_q attn.to_k attn.to_v proj_mlp"
    ),
    "diffusion_model.single_blocks.0.linear2": ["single_transformer_blocks.0.proj_out"],
}
# ComfyUI's layer: the layers of diffusers whose rows it has, in order.
KNOWN = {
    "wan-i2v": {
        "diffusion_model.blocks.0.self_attn.q": ["blocks.0.attn1.to_q"],
        "diffusion_model.blocks.0.self_attn.o": ["blocks.0.attn1.to_out.0"],
        "diffusion_model.blocks.0.cross_attn.k_img": ["blocks.0.attn2.add_k_proj"],
        "diffusion_model.blocks.0.ffn.0": ["blocks.0.ffn.net.0.proj"],
    },
    "ltx": {
        "diffusion_model.transformer_blocks.0.attn2.to_out.0": ["transformer_blocks.0.attn2.to_out.0"],
        "diffusion_model.transformer_blocks.0.ff.net.0.proj": ["transformer_blocks.0.ff.net.0.proj"],
    },
    "cogvideox": {
        "diffusion_model.blocks.0.q": ["transformer_blocks.0.attn1.to_q"],
        "diffusion_model.blocks.0.attn_out": ["transformer_blocks.0.attn1.to_out.0"],
        "diffusion_model.blocks.0.ff_out": ["transformer_blocks.0.ff.net.2"],
    },
    "mochi": {
        "diffusion_model.blocks.0.attn.qkv_x": of("transformer_blocks.0.attn1", "to_q to_k to_v"),
        "diffusion_model.blocks.0.attn.qkv_y": of("transformer_blocks.0.attn1", "add_q_proj add_k_proj add_v_proj"),
        "diffusion_model.blocks.0.mlp_x.w2": ["transformer_blocks.0.ff.net.2"],
    },
    "lumina-2": {
        "diffusion_model.layers.0.attention.qkv": of("layers.0.attn", "to_q to_k to_v"),
        "diffusion_model.noise_refiner.0.feed_forward.w3": ["noise_refiner.0.feed_forward.linear_3"],
    },
    "hunyuan-video": _DOUBLE | _SINGLE,
    "hunyuan-video-1.5": _DOUBLE,
    "hunyuan-image": _DOUBLE | _SINGLE,
    "ovis-image": _SINGLE | {name: parts for name, parts in _DOUBLE.items() if "mlp" not in name},
    "flux": {
        "transformer.transformer_blocks.0.attn.to_q": ["transformer_blocks.0.attn.to_q"],
        "transformer.single_transformer_blocks.0.proj_mlp": ["single_transformer_blocks.0.proj_mlp"],
    },
}


def by_peft(weights, name, weight):
    """The weight of a layer, with its adapter if it has one."""
    if f"{name}.lora_A.default.weight" not in weights:
        return weight
    up, down = weights[f"{name}.lora_B.default.weight"], weights[f"{name}.lora_A.default.weight"]
    adapted = weight + up @ down * SPEC.alpha / SPEC.rank
    magnitudes = weights.get(f"{name}.lora_magnitude_vector.default.weight")
    return adapted if magnitudes is None else magnitudes[:, None] * adapted / adapted.norm(dim=1, keepdim=True)


def by_comfyui(tensors, layer, weight):
    adapted = weight + tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
    scale = tensors.get(f"{layer}.dora_scale")
    if scale is None:
        return adapted
    assert scale.shape == (len(weight), 1)
    return adapted * scale / weight.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("ends", ["", "to_v"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_comfyui_gets_the_weights_that_were_trained(tmp_path, name, dora, ends):
    """All layers, also joined ones of which one part alone has adapters."""
    torch.manual_seed(0)
    spec, lora = spec_of(name), SPEC.model_copy(update={"dora": dora})
    model = models.build(spec, device="cpu", dtype=torch.float32, seed=0)
    weights = trained(model, spec.class_name, dora=dora, ends=ends)
    models.save_for_comfyui(tmp_path, spec, lora, weights, lambda: model)
    if name == "flux" and not dora:  # ComfyUI reads diffusers' file
        assert not list(tmp_path.iterdir())
        return
    tensors = load_file(tmp_path / comfyui.FILE)
    for layer, layers in KNOWN[name].items():
        if not any(part.endswith(ends) for part in layers):
            continue
        frozen = [(part, model.get_parameter(f"{part}.weight").detach()) for part in layers]
        wanted = torch.cat([by_peft(weights, part, weight) for part, weight in frozen])
        found = by_comfyui(tensors, layer, torch.cat([weight for _, weight in frozen]))
        torch.testing.assert_close(found, wanted)
    # No layer is left out, and each is ComfyUI's: all that was trained is written.
    ups = [key for key in tensors if key.endswith(".lora_B.weight")]
    written = sum((tensors[up] @ tensors[up.replace("lora_B", "lora_A")]).square().sum() for up in ups)
    pairs = [(up, up.replace("lora_B", "lora_A")) for up in weights if ".lora_B." in up]
    learned = sum((weights[up] @ weights[down] * 3).square().sum() for up, down in pairs)
    torch.testing.assert_close(written, learned)
    assert not [key for key in tensors if not key.endswith((".lora_A.weight", ".lora_B.weight", ".dora_scale"))]


def test_halves_that_comfyui_has_in_the_other_order_are_exchanged(tmp_path):
    spec = spec_of("mochi")
    weights = trained(models.outline(spec), spec.class_name, dora=False, ends="ff.net.0.proj")
    models.save_for_comfyui(tmp_path, spec, SPEC, weights, lambda: None)
    gate, value = load_file(tmp_path / comfyui.FILE)["diffusion_model.blocks.0.mlp_x.w1.lora_B.weight"].chunk(2)
    up = weights["transformer_blocks.0.ff.net.0.proj.lora_B.default.weight"]
    torch.testing.assert_close(torch.cat([value, gate]), 3 * up)


def test_halves_that_are_layers_of_their_own_in_comfyui_are_parted(tmp_path):
    """Ovis-Image's: silu(gate) · up."""
    spec, layer = spec_of("ovis-image"), "transformer_blocks.0.ff_context.net.0.proj"
    weights = trained(models.outline(spec), spec.class_name, dora=False, ends="ff_context.net.0.proj")
    models.save_for_comfyui(tmp_path, spec, SPEC, weights, lambda: None)
    found = load_file(tmp_path / comfyui.FILE)
    up, gate = (f"diffusion_model.double_blocks.0.txt_mlp.{each}" for each in ("up_proj", "gate_proj"))
    assert found.keys() == {f"{each}.lora_{kind}.weight" for each in (up, gate) for kind in "AB"}
    wanted = 3 * weights[f"{layer}.lora_B.default.weight"]
    torch.testing.assert_close(torch.cat([found[f"{each}.lora_B.weight"] for each in (up, gate)]), wanted)
    assert all(
        torch.equal(found[f"{each}.lora_A.weight"], weights[f"{layer}.lora_A.default.weight"]) for each in (up, gate)
    )


def test_a_layer_that_comfyui_cannot_be_given_is_named(tmp_path):
    spec = spec_of("wan-i2v")
    weights = {
        "proj_out.lora_A.default.weight": torch.zeros(2, 24),
        "proj_out.lora_B.default.weight": torch.zeros(16, 2),
    }
    with pytest.raises(UserError, match=r"ComfyUI has no place for adapters of proj_out \(strategy\.lora\.targets\)"):
        models.save_for_comfyui(tmp_path, spec, SPEC, weights, lambda: None)
    assert not list(tmp_path.iterdir())


def test_a_model_that_comfyui_cannot_be_given_is_named(tmp_path):
    spec = spec_of("sana-video")
    with pytest.raises(UserError, match="ComfyUI reads no adapters of SanaVideoTransformer3DModel; use diffusers or"):
        models.save_for_comfyui(tmp_path, spec, SPEC, {}, lambda: None)
