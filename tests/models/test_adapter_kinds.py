"""LoKr, LoHa, rank-stabilised LoRA, and ranks and layers by rules: trained, and read by peft, diffusers and ComfyUI."""

from __future__ import annotations

import json
import re

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from stepping import equipped, one_batch
from tiny_loras import spec_of
from tiny_models import SANA

from bigdit import engines, models
from bigdit.errors import UserError
from bigdit.models import comfyui
from bigdit.models.lora import apply_lora
from bigdit.models.lora_files import FILE
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import LoraSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

CPU = torch.device("cpu")
RULES = {"transformer_blocks.0.attn?.to_q": 4, "to_out.0": 3}


@pytest.mark.parametrize("base", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_they_learn_from_the_base_on(kind, base):
    strategy = Strategy(lora=LoraSpec(kind=kind, rank=2, alpha=4, base=base), optimizer=OptimizerSpec(lr=3e-2))
    family, model = equipped(strategy)
    engine = engines.create(strategy, model, family, device=CPU)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    _, plain = equipped(Strategy(lora=LoraSpec(base=base)))
    batch = one_batch().to(CPU, torch.bfloat16)
    first, other = (
        family.predict(each.to(CPU), batch.latents.bfloat16(), torch.tensor([0.2, 0.7]), batch)
        for each in (model, plain)
    )
    assert torch.equal(first, other)
    losses = [train_step(engine, family, FlowMatchingSpec(), [one_batch()], lr=3e-2).loss.item() for _ in range(6)]
    assert losses[-1] < losses[0] - 0.3
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def adapted(spec, lora):
    """(the model in fp32 with random adapters, these by name, the model without them)"""
    plain, model = (models.build(spec, device="cpu", dtype=torch.float32, seed=0).eval() for _ in range(2))
    apply_lora(model, models.family(spec.class_name), lora, seed=0)
    weights = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(1)
    for each in weights.values():
        each.copy_(torch.randn_like(each) * 0.3)
    return model, weights, plain


def prediction(model):
    batch = one_batch()
    with torch.no_grad():
        return models.family(SANA.class_name).predict(model, batch.latents, torch.tensor([0.2, 0.7]), batch)


@pytest.mark.parametrize("settings", [{}, {"rslora": True}, {"ranks": RULES}, {"ranks": RULES, "rslora": True}])
@pytest.mark.parametrize("kind", ["lora", "lokr", "loha"])
def test_others_read_the_same_model(tmp_path, kind, settings):
    if kind != "lora" and "rslora" in settings:
        with pytest.raises(ValueError, match=f"rslora is for LoRA, and kind is {kind}; set alpha"):
            LoraSpec(kind=kind, **settings)
        return
    lora = LoraSpec(kind=kind, rank=2, alpha=6, **settings)
    model, weights, plain = adapted(SANA, lora)
    models.save_adapters(tmp_path, lora, weights)
    wanted, without = prediction(model), prediction(plain)
    if kind == "lora":
        tensors = load_file(tmp_path / FILE)
        ranks = {len(each) for name, each in tensors.items() if "lora_A" in name}
        assert ranks == ({2, 3, 4} if "ranks" in settings else {2})
        plain.load_lora_adapter(tensors, metadata=metadata(tmp_path / FILE))
        read = plain
    else:
        read = PeftModel.from_pretrained(plain, tmp_path).base_model.model
    torch.testing.assert_close(prediction(read), wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - without).abs().max() > 0.1


def metadata(file):
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["lora_adapter_metadata"])


def delta(tensors, layer):
    """What ComfyUI adds to a weight, without alpha (comfy/weight_adapter/loha.py and lokr.py)."""
    part = {name.removeprefix(f"{layer}."): each for name, each in tensors.items() if name.startswith(f"{layer}.")}
    if "hada_w1_a" in part:
        return (part["hada_w1_a"] @ part["hada_w1_b"]) * (part["hada_w2_a"] @ part["hada_w2_b"])
    one, two = (
        part[f"lokr_w{i}"] if f"lokr_w{i}" in part else part[f"lokr_w{i}_a"] @ part[f"lokr_w{i}_b"] for i in (1, 2)
    )
    return torch.kron(one, two)


@pytest.mark.parametrize(
    ("kind", "name", "layer", "layers"),
    [
        ("lokr", "wan-t2v", "diffusion_model.blocks.0.self_attn.q", ["blocks.0.attn1.to_q"]),
        ("loha", "wan-t2v", "diffusion_model.blocks.0.cross_attn.o", ["blocks.0.attn2.to_out.0"]),
        ("lokr", "flux", *2 * ["transformer.transformer_blocks.0.attn.to_k"]),
        ("loha", "hunyuan-video", "diffusion_model.double_blocks.0.img_attn.qkv", "QKV"),
        ("loha", "mochi", "diffusion_model.blocks.0.attn.qkv_x", "QKV"),
    ],
)
def test_comfyui_adds_what_was_trained(tmp_path, kind, name, layer, layers):
    spec, lora = spec_of(name), LoraSpec(kind=kind, rank=2, alpha=6)
    model, weights, _ = adapted(spec, lora)
    models.save_for_comfyui(tmp_path, spec, lora, weights, lambda: None)
    attention = {"hunyuan-video": "attn", "mochi": "attn1"}.get(name)
    if layers == "QKV":
        layers = [f"transformer_blocks.0.{attention}.to_{each}" for each in "qkv"]
    layers = [layers.removeprefix("transformer.")] if isinstance(layers, str) else layers
    wanted = torch.cat([model.get_submodule(each).get_delta_weight("default") for each in layers])
    found = delta(load_file(tmp_path / comfyui.FILE), layer)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)
    assert wanted.abs().max() > 0


def test_what_has_no_form_is_refused(tmp_path):
    spec, lora = spec_of("hunyuan-video"), LoraSpec(kind="lokr", rank=2)
    _, weights, _ = adapted(spec, lora)
    refused = r"^ComfyUI joins or parts .*\.to_q, and LoKr has no such form; lora and loha have$"
    with pytest.raises(UserError, match=refused):
        models.save_for_comfyui(tmp_path, spec, lora, weights, lambda: None)
    for settings, why in (
        ({"kind": "loha", "dora": True}, "dora is for LoRA, and kind is loha"),
        ({"kind": "lokr", "base": "nf4"}, "base nf4 packs weights to another shape, which lokr reads; use int8 or fp8"),
    ):
        with pytest.raises(ValueError, match=why):
            LoraSpec(**settings)
    for settings in ({"compile_blocks": True}, {"float8": "rowwise"}):
        with pytest.raises(ValueError, match=r"was not tried with lora.kind lokr; leave one of them out"):
            Strategy(lora=lora, **settings)


def test_layers_and_ranks_are_chosen_by_rules():
    lora = LoraSpec(targets=("*_blocks.1.*.to_[qk]", "to_out.0"), ranks={"*.1.attn1.*": 3})
    _, model = equipped(Strategy(lora=lora))
    downs = {name.split(".lora_A")[0]: len(p) for name, p in model.named_parameters() if ".lora_A." in name}
    of_one = {f"transformer_blocks.1.attn{i}.to_{each}" for i in (1, 2) for each in ("q", "k", "out.0")}
    assert downs.keys() == of_one | {f"transformer_blocks.0.attn{i}.to_out.0" for i in (1, 2)}
    assert {name for name, rank in downs.items() if rank == 3} == {name for name in of_one if "attn1" in name}
    assert set(downs.values()) == {3, 16}
    for settings, key in (({"targets": ("*.to_w",)}, "targets"), ({"ranks": {"ff.net.0": 2}}, "ranks")):
        with pytest.raises(UserError, match=re.escape(f"lora.{key}: no ")):
            equipped(Strategy(lora=LoraSpec(**settings)))
    with pytest.raises(UserError, match=r"ends in 'to_v'; name 'to_v' in strategy\.lora\.targets, with the others to"):
        equipped(Strategy(lora=LoraSpec(targets=("to_q",), ranks={"to_v": 2})))
    with pytest.raises(UserError, match=r"ends in 'to_w'; did you mean (to_[kqv](, )?){3}\?$"):
        equipped(Strategy(lora=LoraSpec(ranks={"to_w": 2})))
    for settings in ({"targets": ("attn1",)}, {"ranks": {"attn1": 2}}):
        with pytest.raises(UserError, match=re.escape("ends in 'attn1'; did you mean '*.attn1.*'?")):
            equipped(Strategy(lora=LoraSpec(**settings)))
    with pytest.raises(UserError, match=re.escape("did you mean 'transformer_blocks.*'?")):
        equipped(Strategy(lora=LoraSpec(targets=("transformer_blocks",))))
