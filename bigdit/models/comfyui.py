"""Adapters in ComfyUI's names and shapes, for models that ComfyUI has.

ComfyUI reads no metadata: without a tensor `.alpha` the product B·A is not scaled. Source: comfy/lora.py,
comfy/utils.py and comfy/weight_adapter of ComfyUI 0.33.0, and its models for the names of their layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from bigdit.errors import UserError

FILE = "comfyui_lora_weights.safetensors"

AS_DIFFUSERS = frozenset(
    {
        *(
            "AuraFlowTransformer2DModel",
            "ChromaTransformer2DModel",
            "Flux2Transformer2DModel",
            "FluxTransformer2DModel",
        ),
        *("HiDreamImageTransformer2DModel", "Kandinsky5Transformer3DModel", "Krea2Transformer2DModel"),
        *("LongCatImageTransformer2DModel", "PixArtTransformer2DModel", "QwenImageTransformer2DModel"),
        *("SD3Transformer2DModel", "ZImageTransformer2DModel"),
    }
)
"""Classes whose layers ComfyUI also knows by diffusers' names."""

_TURNED = re.compile(r".*\bnorm_out\.linear|SD3.*norm1_context\.linear")
"""Classes and layers of these whose halves of rows ComfyUI swaps in B, but not in the scales of DoRA."""


def qkv(here: str, there: str) -> dict[str, str]:
    """The names of queries, keys and values `here`, which are the first three parts of one layer `there`."""
    return {here.format(each): f"{there}#{i}" for i, each in enumerate("qkv")}


WAN = {
    f"{attention}.{here}": f"{there}_attn.{layer}"
    for attention, there in (("attn1", "self"), ("attn2", "cross"))
    for here, layer in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
} | {
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
_LTX = {
    each: each
    for each in (
        *(f"attn{i}.to_{layer}" for i in (1, 2) for layer in ("q", "k", "v", "out.0")),
        *("ff.net.0.proj", "ff.net.2"),
    )
}
_COGVIDEOX = {"norm1.linear": "norm1.linear", "norm2.linear": "norm2.linear"} | {
    "attn1.to_q": "q",
    "attn1.to_k": "k",
    "attn1.to_v": "v",
    "attn1.to_out.0": "attn_out",
    "ff.net.0.proj": "ff_proj",
    "ff.net.2": "ff_out",
}
MOCHI = qkv("attn1.to_{}", "attn.qkv_x") | qkv("attn1.add_{}_proj", "attn.qkv_y")
MOCHI |= {
    "attn1.to_out.0": "attn.proj_x",
    "attn1.to_add_out": "attn.proj_y",
    "norm1.linear": "mod_x",
    "norm1_context.linear": "mod_y",
    "norm1_context.linear_1": "mod_y",
    "ff.net.0.proj": "mlp_x.w1~",
    "ff.net.2": "mlp_x.w2",
    "ff_context.net.0.proj": "mlp_y.w1~",
    "ff_context.net.2": "mlp_y.w2",
}
LUMINA = qkv("attn.to_{}", "attention.qkv")
LUMINA |= {"attn.to_out.0": "attention.out", "norm1.linear": "adaLN_modulation.1"}
LUMINA |= {f"feed_forward.linear_{i}": f"feed_forward.w{i}" for i in (1, 2, 3)}
DOUBLE = qkv("attn.to_{}", "img_attn.qkv") | qkv("attn.add_{}_proj", "txt_attn.qkv")
DOUBLE |= {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
SINGLE = qkv("attn.to_{}", "linear1")
SINGLE |= {"proj_mlp": "linear1#3", "proj_out": "linear2", "norm.linear": "modulation.lin"}
_REFINER = qkv("attn.to_{}", "self_attn.qkv")
_REFINER |= {"attn.to_out.0": "self_attn.proj", "ff.net.0.proj": "mlp.0", "ff.net.2": "mlp.2"}
_REFINER |= {"norm_out.linear": "adaLN_modulation.1"}
_YAK = DOUBLE | {
    f"{ff}.net.{layer}": f"{mlp}.{there}"
    for ff, mlp in (("ff", "img_mlp"), ("ff_context", "txt_mlp"))
    for layer, there in (("0.proj", "up_proj|gate_proj"), ("2", "down_proj"))
}
_HUNYUAN = {
    "transformer_blocks": ("double_blocks", DOUBLE),
    "single_transformer_blocks": ("single_blocks", SINGLE),
    "context_embedder.token_refiner.refiner_blocks": ("txt_in.individual_token_refiner.blocks", _REFINER),
}

_RENAMED: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "WanTransformer3DModel": {"blocks": ("blocks", WAN)},
    "OvisImageTransformer2DModel": {
        "transformer_blocks": ("double_blocks", _YAK),
        "single_transformer_blocks": ("single_blocks", SINGLE),
    },
    "LTXVideoTransformer3DModel": {"transformer_blocks": ("transformer_blocks", _LTX)},
    "CogVideoXTransformer3DModel": {"transformer_blocks": ("blocks", _COGVIDEOX)},
    "MochiTransformer3DModel": {"transformer_blocks": ("blocks", MOCHI)},
    "Lumina2Transformer2DModel": {each: (each, LUMINA) for each in ("layers", "noise_refiner", "context_refiner")},
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
    "HunyuanVideo15Transformer3DModel": _HUNYUAN,
    "HunyuanImageTransformer2DModel": _HUNYUAN,
}
"""For each class its lists of blocks, with ComfyUI's names of the list and of the layers in a block. `#i`: part i of
the rows of one layer. `~`: the halves of its rows are swapped. `|`: each half is a layer."""


KNOWN = AS_DIFFUSERS | _RENAMED.keys()
"""Classes whose adapters ComfyUI reads."""


class Adapter(NamedTuple):
    """For one linear layer: `down` [rank, in], `up` [out, rank] times the scale, and DoRA's `magnitudes` [out]."""

    down: torch.Tensor
    up: torch.Tensor
    magnitudes: torch.Tensor | None


def needed(class_name: str, *, dora: bool) -> bool:
    """Whether ComfyUI cannot read the class's adapters in diffusers' layout. Raises UserError if in no layout."""
    if class_name not in KNOWN:
        raise UserError(f"ComfyUI reads no adapters of {class_name}; use diffusers or `bigdit sample`")
    return class_name in _RENAMED or (dora and class_name in AS_DIFFUSERS)


def tensors(
    class_name: str,
    adapters: Mapping[str, Adapter],
    rows: Mapping[str, int],
    weight: Callable[[str], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The adapters in ComfyUI's layout. `rows`: of each linear layer; `weight`: returns a frozen weight, for DoRA.

    Raises UserError for a layer that ComfyUI does not have.
    """
    dora = any(each.magnitudes is not None for each in adapters.values())
    found: dict[str, torch.Tensor] = {}
    left = set(adapters)
    for layer, names in layers(class_name, rows, dora=dora).items():
        if left.isdisjoint(names):
            continue
        left.difference_update(names)
        down = torch.cat([adapters[name].down for name in names if name in adapters])
        joined = {"lora_A.weight": down, "lora_B.weight": _up(names, adapters, rows)}
        if dora:
            joined["dora_scale"] = torch.cat([_dora_scale(weight(name), adapters.get(name)) for name in names])
        parent, _, there = layer.removesuffix("~").rpartition(".")
        owns = there.split("|")
        for kind, tensor in joined.items():
            rows_of = kind != "lora_A.weight"
            turned = torch.cat(tensor.chunk(2)[::-1]) if rows_of and layer.endswith("~") else tensor
            shares = turned.chunk(len(owns)) if rows_of else [turned] * len(owns)
            found |= {f"{parent}.{own}.{kind}": share.clone() for own, share in zip(owns, shares, strict=True)}
    if left:
        raise UserError(f"ComfyUI has no place for adapters of {min(left)} (strategy.lora.targets)")
    return found


def hadamard(
    class_name: str, adapters: Mapping[str, Mapping[str, torch.Tensor]], rows: Mapping[str, int], scale: float
) -> dict[str, torch.Tensor]:
    """LoHa in ComfyUI's layout: each product is joined by rows, like LoRA's. Raises UserError as `tensors` does."""
    found = {}
    for each, factor in (("hada_w1", scale), ("hada_w2", 1.0)):
        own = {name: Adapter(part[f"{each}_b"], part[f"{each}_a"] * factor, None) for name, part in adapters.items()}
        for name, tensor in tensors(class_name, own, rows, lambda name: torch.empty(0)).items():
            layer, kind, _ = name.rsplit(".", 2)
            found[f"{layer}.{each}_{'b' if kind == 'lora_A' else 'a'}"] = tensor
    return found


def kronecker(
    class_name: str, adapters: Mapping[str, Mapping[str, torch.Tensor]], rows: Mapping[str, int], scale: float
) -> dict[str, torch.Tensor]:
    """LoKr in ComfyUI's layout. Raises UserError for a layer that is not one layer in ComfyUI."""
    found, left = {}, set(adapters)
    for layer, names in layers(class_name, rows).items():
        if left.isdisjoint(names):
            continue
        if len(names) > 1 or layer.endswith("~") or "|" in layer:
            raise UserError(f"ComfyUI joins or parts {names[0]}, and LoKr has no such form; lora and loha have")
        left.remove(names[0])
        for part, tensor in adapters[names[0]].items():
            found[f"{layer}.{part}"] = tensor * scale if part in ("lokr_w1", "lokr_w1_a") else tensor.clone()
    if left:
        raise UserError(f"ComfyUI has no place for adapters of {min(left)} (strategy.lora.targets)")
    return found


PRODUCTS = {"lokr": kronecker, "loha": hadamard}
"""Layouts of adapters other than LoRA. Alpha is not written, so the scale is in one matrix."""


def layers(class_name: str, names: Iterable[str], *, dora: bool = False) -> dict[str, list[str]]:
    """ComfyUI's layers, and for each the model's layers whose rows it has, in order."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        place = _place(class_name, name, dora=dora)
        if place is not None:
            layer, _, part = place.partition("#")
            found.setdefault(layer, {})[int(part or 0)] = name
    return {layer: [parts[i] for i in sorted(parts)] for layer, parts in found.items()}


def _place(class_name: str, name: str, *, dora: bool) -> str | None:
    """The layer of ComfyUI that holds a layer."""
    if class_name in AS_DIFFUSERS:
        return None if dora and _TURNED.fullmatch(f"{class_name} {name}") else f"transformer.{name}"
    match = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", name)
    blocks, there = _RENAMED.get(class_name, {}).get(match[1], ("", {})) if match else ("", {})
    return f"diffusion_model.{blocks}.{match[2]}.{there[match[3]]}" if match and match[3] in there else None


def _up(names: list[str], adapters: Mapping[str, Adapter], rows: Mapping[str, int]) -> torch.Tensor:
    """A block-diagonal matrix of the adapters; rows of zeros for layers without one."""
    blocks = [adapters[name].up if name in adapters else torch.empty(rows[name], 0) for name in names]
    return torch.block_diag(*blocks)


def _dora_scale(weight: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    """[rows, 1]. ComfyUI computes (W + B·A) · scale / ‖W‖ by rows, and DoRA is (W + B·A) · magnitudes / ‖W + B·A‖.

    Source: weight_decompose in comfy/weight_adapter/base.py; Liu et al., arXiv:2402.09353, equation 5.
    """
    weight = weight.float()
    norms = torch.linalg.norm(weight, dim=1, keepdim=True)
    if adapter is None or adapter.magnitudes is None:
        return norms
    adapted = torch.linalg.norm(weight + adapter.up @ adapter.down, dim=1, keepdim=True)
    return adapter.magnitudes[:, None] * norms / adapted
