"""LoRA weights to start from, in every layout: the model computes what the file holds."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_loras import SPEC, TINY, spec_of, trained
from torch import nn

from bigdit import checkpoint, models
from bigdit.errors import UserError
from bigdit.models import comfyui
from bigdit.models.lora import apply_lora
from bigdit.models.lora_files import FILE
from bigdit.strategy import LoraSpec, ModelSpec

FLUX = spec_of("flux")
NAMES = [name for name in TINY if spec_of(name).class_name in comfyui.KNOWN and name != "ovis-image"]


def started(spec: ModelSpec, lora: LoraSpec, tensors, config=None):
    """A model whose adapters start from a file, and the log."""
    model = models.build(spec, device="cpu", dtype=torch.float32, seed=0)
    apply_lora(model, models.family(spec.class_name), lora, seed=1)
    notices = models.start_adapters(model, lora, models.read_adapters(spec, tensors, config or {}))
    return model, notices


def change(model: nn.Module, lora: LoraSpec, layer: str) -> torch.Tensor:
    """B·A as it is added to the weight."""
    up, down = (model.get_parameter(f"{layer}.lora_{kind}.default.weight") for kind in "BA")
    return (up @ down).detach() * lora.alpha / lora.rank


def wanted(weights, layer):
    """The same for adapters with peft's names."""
    return (
        weights[f"{layer}.lora_B.default.weight"] @ weights[f"{layer}.lora_A.default.weight"] * SPEC.alpha / SPEC.rank
    )


def layers_of(weights):
    return [name.removesuffix(".lora_A.default.weight") for name in weights if ".lora_A." in name]


def lora_of(weights, **more):
    return LoraSpec(targets=tuple(layers_of(weights)), **{"rank": 2, "alpha": 6.0} | more)


@pytest.mark.parametrize("kind", ["diffusers", "comfyui"])
@pytest.mark.parametrize("name", NAMES)
def test_an_export_starts_a_run_as_it_ended(tmp_path, name, kind):
    """With another alpha. Layers that ComfyUI joins have a higher rank there."""
    torch.manual_seed(0)
    spec = spec_of(name)
    weights = trained(models.outline(spec), spec.class_name, dora=False)
    models.save_adapters(tmp_path, SPEC, weights)
    models.save_for_comfyui(tmp_path, spec, SPEC, weights, lambda: None)
    file = tmp_path / (comfyui.FILE if kind == "comfyui" and (tmp_path / comfyui.FILE).exists() else FILE)
    lora = lora_of(weights, alpha=1.0)
    model, _ = started(spec, lora, load_file(file))
    for layer in layers_of(weights):
        torch.testing.assert_close(change(model, lora, layer), wanted(weights, layer), atol=1e-4, rtol=1e-4)


def of_kohya(layer, up, down, alpha):
    return {f"{layer}.lora_up.weight": up, f"{layer}.lora_down.weight": down, f"{layer}.alpha": torch.tensor(alpha)}


def test_kohyas_names_and_alpha_are_read():
    """For FLUX.1 they are ComfyUI's layers, which diffusers maps to its own."""
    torch.manual_seed(0)
    up, down = torch.randn(48, 4), torch.randn(4, 16)
    lora = LoraSpec(rank=4, alpha=4.0)
    model, _ = started(FLUX, lora, of_kohya("lora_unet_double_blocks_0_img_attn_qkv", up, down, 2.0))
    for part, layer in zip(up.chunk(3), ("to_q", "to_k", "to_v"), strict=True):
        torch.testing.assert_close(change(model, lora, f"transformer_blocks.0.attn.{layer}"), part @ down / 2)
    own = of_kohya("lora_unet_transformer_blocks_0_attn_to_q", up[:16], down, 2.0)
    model, notices = started(FLUX, lora, own)
    torch.testing.assert_close(change(model, lora, "transformer_blocks.0.attn.to_q"), up[:16] @ down / 2)
    assert notices[-1] == "model.lora_from: 10 layers of this run are not in it, and start as new ones"
    assert change(model, lora, "transformer_blocks.0.attn.to_k").abs().max() == 0


@pytest.mark.parametrize(
    ("layer", "down", "up"),
    [
        ("transformer.transformer_blocks.0.attn.{}", "lora.down.weight", "lora.up.weight"),
        ("transformer.transformer_blocks.0.attn.{}", "lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
        ("transformer.transformer_blocks.0.attn.processor.{}_lora", "down.weight", "up.weight"),
        ("transformer.transformer_blocks.0.attn.{}", "lora_down.weight", "lora_up.weight"),  # OneTrainer
        ("lora_transformer_transformer_blocks_0_attn_{}", "lora_down.weight", "lora_up.weight"),
        ("lycoris_transformer_blocks_0_attn_{}", "lora_down.weight", "lora_up.weight"),
        ("diffusion_model.transformer_blocks.0.attn.{}", "lora_A.weight", "lora_B.weight"),  # ai-toolkit
        ("transformer.base_model.model.transformer_blocks.0.attn.{}", "lora_A.weight", "lora_B.weight"),  # SimpleTuner
        ("lora_unet_transformer_blocks_0_attn_{}_", "lora_down.weight", "lora_up.weight"),
        ("base_model.model.transformer_blocks.0.attn.{}", "lora_A.default.weight", "lora_B.default.weight"),
    ],
)
def test_names_of_other_trainers_are_read(tmp_path, layer, down, up):
    """Without an alpha, it is the rank. What OneTrainer keeps of text encoders is left out, and counted."""
    torch.manual_seed(0)
    lora = LoraSpec(rank=2, alpha=2.0, targets=("to_q", "to_out.0"))
    tensors = {"bundle_emb.cat.t5_out": torch.ones(2, 4)}
    last = "to_out" if "processor" in layer else "to_out_0" if "blocks_0" in layer else "to_out.0"
    own = {"to_q": "to_q", "to_out.0": last}
    file = tmp_path / "lora.safetensors"
    for name in own.values():
        tensors[f"{layer.format(name)}.{down}"] = torch.randn(2, 16)
        tensors[f"{layer.format(name)}.{up}"] = torch.randn(16, 2)
    save_file(tensors, file)
    model = models.build(FLUX, device="cpu", dtype=torch.float32, seed=0)
    apply_lora(model, models.family(FLUX.class_name), lora, seed=1)
    notices = checkpoint.load_adapters(model, FLUX, lora, file)
    assert notices[-1] == "model.lora_from: left out: 1 tensor of text encoders"
    for name, there in own.items():
        expected = tensors[f"{layer.format(there)}.{up}"] @ tensors[f"{layer.format(there)}.{down}"]
        torch.testing.assert_close(change(model, lora, f"transformer_blocks.0.attn.{name}"), expected)


@pytest.mark.parametrize(("rank", "exact"), [(6, True), (3, True), (2, False)])
def test_another_rank_is_exact_or_the_nearest(rank, exact):
    """By the largest singular values of B·A, here of rank 3."""
    torch.manual_seed(0)
    layer = "transformer_blocks.0.attn.to_q"
    up, down = torch.randn(16, 3), torch.randn(3, 16)
    tensors = {f"transformer.{layer}.lora_B.weight": up, f"transformer.{layer}.lora_A.weight": down}
    lora = LoraSpec(rank=rank, alpha=8.0, targets=("transformer_blocks.0.attn.to_q",))
    model, notices = started(FLUX, lora, tensors)
    found, lengths = change(model, lora, layer), torch.linalg.svdvals(up @ down)
    torch.testing.assert_close((found - up @ down).norm(), lengths[rank:].norm(), atol=1e-5, rtol=1e-5)
    lost = lengths[rank:].norm() / lengths.norm()
    said = f"model.lora_from: rank 3 became {rank} by SVD; {lost:.1%} of its length is lost"
    assert (said in notices) != exact
    assert all(model.get_parameter(f"{layer}.lora_A.default.weight").norm(dim=1) > 0)  # all of them can learn


def test_pefts_configuration_scales():
    layer = "transformer_blocks.0.attn.to_q"
    tensors = {
        f"transformer.{layer}.lora_B.weight": torch.ones(16, 4),
        f"transformer.{layer}.lora_A.weight": torch.ones(4, 16),
    }
    for config, scale in (
        ({"lora_alpha": 8}, 2),
        ({"lora_alpha": 8, "use_rslora": True}, 4),
        ({"lora_alpha": 1, "alpha_pattern": {f"transformer.{layer}": 2}}, 0.5),
    ):
        lora = LoraSpec(rank=4, alpha=4.0, targets=("to_q",))
        model, _ = started(FLUX, lora, tensors, config)
        torch.testing.assert_close(change(model, lora, layer), torch.full((16, 16), 4.0 * scale))


@pytest.mark.parametrize("prefix", ["", "transformer.", "base_model.model."])
def test_an_alpha_of_its_own_counts_whatever_the_prefix(prefix):
    """diffusers' and peft's settings name layers without the prefix that their tensors have."""
    layer = "transformer_blocks.0.attn.to_q"
    tensors = {f"{prefix}{layer}.lora_B.weight": torch.ones(16, 4), f"{prefix}{layer}.lora_A.weight": torch.ones(4, 16)}
    lora = LoraSpec(rank=4, alpha=4.0, targets=("to_q",))
    model, _ = started(FLUX, lora, tensors, {"lora_alpha": 1, "alpha_pattern": {layer: 8}})
    torch.testing.assert_close(change(model, lora, layer), torch.full((16, 16), 8.0))


@pytest.mark.parametrize("whole", [True, False])
def test_pefts_folder_and_its_file_have_the_alpha_beside(tmp_path, whole):
    layer = "transformer_blocks.0.attn.to_q"
    pair = {"lora_B": torch.ones(16, 4), "lora_A": torch.ones(4, 16)}
    save_file(
        {f"base_model.model.{layer}.{key}.weight": each for key, each in pair.items()},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    lora = LoraSpec(rank=4, alpha=4.0, targets=("to_q",))
    model = models.build(FLUX, device="cpu", dtype=torch.float32, seed=0)
    apply_lora(model, models.family(FLUX.class_name), lora, seed=1)
    checkpoint.load_adapters(model, FLUX, lora, tmp_path if whole else tmp_path / "adapter_model.safetensors")
    torch.testing.assert_close(change(model, lora, layer), torch.full((16, 16), 8.0))


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": "x"},
        {"lora_alpha": [1]},
        {"alpha_pattern": [1]},
        {"lora_alpha": 4, "alpha_pattern": {"to_q": {}}},
    ],
)
def test_settings_that_are_no_numbers_are_named(config):
    with pytest.raises(UserError, match="to_q has an alpha of nan, and a number above 0 was expected"):
        started(FLUX, LoraSpec(rank=2), PAIR, config)


ONE = "transformer.transformer_blocks.0.attn.to_q"
PAIR = {f"{ONE}.lora_A.weight": torch.ones(2, 16), f"{ONE}.lora_B.weight": torch.ones(16, 2)}


@pytest.mark.parametrize(
    ("tensors", "lora", "problem"),
    [
        ({}, {}, "it holds no LoRA"),
        ({f"{ONE}.lora_A.weight": torch.ones(2, 16)}, {}, f"{ONE} lacks one of its two matrices"),
        (PAIR | {f"{ONE}.alpha": torch.tensor(0.0)}, {}, f"{ONE} has an alpha of 0, and a number above 0 was expected"),
        (PAIR | {f"{ONE}.lora_B.weight": torch.full((16, 2), math.nan)}, {}, f"{ONE} holds NaN or infinity; take a"),
        (PAIR | {f"{ONE}.alpha": torch.ones(3)}, {}, f"{ONE} has an alpha of nan, and a number above 0 was expected"),
        (PAIR | {f"{ONE}.lora_A.weight": torch.ones(3, 16)}, {}, r"has \[3, 16\] and \[16, 2\], which do not multiply"),
        (PAIR | {f"{ONE}.lora_A.weight": torch.ones(3)}, {}, r"has \[3\] and \[16, 2\], which do not multiply"),
        (PAIR | {f"{ONE}.lokr_w1": torch.ones(2)}, {}, rf"its tensor {ONE}.lokr_w1 is of LoKr, .*; merge it into"),
        (PAIR | {"x_embedder.bias": torch.ones(2)}, {}, "its tensor x_embedder.bias is of no LoRA; whole weights a"),
        (PAIR | {f"{ONE}.dora_scale": torch.ones(16, 1)}, {}, f"{ONE} has a dora_scale, which depends on the weights"),
        (PAIR, {"dora": True}, "it has no magnitudes; set strategy.lora.dora to false"),
        (PAIR | {f"{ONE}.lora_magnitude_vector": torch.ones(16)}, {}, r"it has magnitudes \(DoRA\); set strategy"),
        (PAIR, {"targets": ("to_k",)}, r"leaves that out; set strategy.lora.targets to \[to_q\]"),
        (
            {f"lora_unet_input_blocks_4_1_attn1_to_q.{key[-13:]}": value for key, value in PAIR.items()},
            {},
            "is none of FluxTransformer2DModel: it is of a U-Net",
        ),
        (
            {f"{ONE}.lora_A.weight": torch.ones(2, 3072), f"{ONE}.lora_B.weight": torch.ones(3072, 2)},
            {},
            r"is 3072 × 3072, and \S+ of the model 16 × 16: its layers are those of flux.1-dev",
        ),
    ],
)  # fmt: skip
def test_what_is_no_start_is_named(tensors, lora, problem):
    with pytest.raises(UserError, match=problem):
        started(FLUX, LoraSpec(**{"rank": 2} | lora), tensors)


XLABS = {
    "double_blocks.0.processor.qkv_lora1": (48, "transformer_blocks.0.attn.to_q"),
    "double_blocks.0.processor.proj_lora2": (16, "transformer_blocks.0.attn.to_add_out"),
    "single_blocks.0.processor.qkv_lora": (48, "single_transformer_blocks.0.attn.to_v"),
}


def test_names_of_xlabs_are_read():
    torch.manual_seed(0)
    tensors = {}
    for name, (rows, _) in XLABS.items():
        tensors |= {f"{name}.down.weight": torch.randn(2, 16), f"{name}.up.weight": torch.randn(rows, 2)}
    targets = tuple({layer.split("attn.")[1] for _, layer in XLABS.values()} | {"to_q", "to_k", "add_q_proj"})
    lora = LoraSpec(rank=2, alpha=2.0, targets=(*targets, "add_k_proj", "add_v_proj"))
    model, _ = started(FLUX, lora, tensors)
    for name, (_, layer) in XLABS.items():
        up = tensors[f"{name}.up.weight"]
        own = up[:16] if layer.endswith("to_q") else up[-16:]
        torch.testing.assert_close(change(model, lora, layer), own @ tensors[f"{name}.down.weight"])


@pytest.mark.parametrize(
    ("layer", "rows", "columns", "owner"),
    [
        (
            "transformer.transformer_blocks.7.attn.to_q",
            1536,
            1536,
            "its layers are those of sd3-medium; set model.name to that",
        ),
        (
            "lora_unet_double_blocks_3_img_attn_qkv",
            9216,
            3072,
            "its layers are those of flux.1-dev; set model.name to that",
        ),
        (
            "diffusion_model.blocks.30.self_attn.q",
            5120,
            5120,
            "its layers are those of wan2.1-t2v-14b; set model.name to that",
        ),
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", 640, 640, "it is of a U-Net, such as"),
        ("lora_unet_down_blocks_1_attentions_0_proj_in", 640, 640, "it is of a U-Net, such as that of SDXL; take a"),
        ("transformer.transformer_blocks.0.attn.to_q", 17, 17, "it is of another model, or in names"),
    ],
)
def test_the_model_that_a_lora_is_of_is_named(layer, rows, columns, owner):
    pair = {f"{layer}.lora_down.weight": torch.ones(2, columns), f"{layer}.lora_up.weight": torch.ones(rows, 2)}
    with pytest.raises(UserError) as error:
        models.read_adapters(spec_of("lumina-2"), pair, {})
    assert owner in error.value.problems[0]


def test_a_folder_without_adapters_is_named(tmp_path):
    lora = LoraSpec(rank=2)
    model, _ = started(FLUX, lora, PAIR)
    with pytest.raises(UserError, match=r"it holds no pytorch_lora_weights\.safetensors; name a"):
        checkpoint.load_adapters(model, FLUX, lora, tmp_path)
