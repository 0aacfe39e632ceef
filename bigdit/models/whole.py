"""A whole transformer as one file, with the names and joined rows of its original project, for ComfyUI.

Each layout inverts diffusers' converter of single files; PixArt's is ComfyUI's key map.
Source: diffusers/loaders/single_file_utils.py of diffusers 0.42; comfy/model_detection.py, comfy/supported_models.py
and comfy/utils.py of ComfyUI 0.33.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from bigdit.errors import UserError
from bigdit.models.build import outline
from bigdit.models.comfyui import DOUBLE, LUMINA, MOCHI, SINGLE, WAN, qkv
from bigdit.models.families import family
from bigdit.strategy import ModelSpec

Names = dict[str, str]


def _blocks(here: str, there: str, names: Names) -> Names:
    return {f"{here}.*.{key}": f"{there}.*.{value}" for key, value in names.items()}


def _two(here: str, there: str, ends: tuple[str, str] = ("in_layer", "out_layer")) -> Names:
    """The two linear layers of an embedder."""
    return {f"{here}.linear_{i}": f"{there}.{end}" for i, end in enumerate(ends, 1)}


_FIRST_AND_THIRD = ("mlp.0", "mlp.2")


def _norms(added: bool, here: str, there: str) -> Names:
    """Names of norms of q and k, with placeholders; `added`: those of text, such as norm_added_q."""
    middle = "added_" if added else ""
    return {here.format(f"{middle}{each}"): there.format(each, name) for each, name in (("q", "query"), ("k", "key"))}


_FLUX_NORMS = _norms(False, "attn.norm_{}.weight", "img_attn.norm.{1}_norm.scale")
_FLUX_NORMS |= _norms(True, "attn.norm_{}.weight", "txt_attn.norm.{1}_norm.scale")
_FLUX_SINGLE = _norms(False, "attn.norm_{}.weight", "norm.{1}_norm.scale")
_FINAL = {"proj_out": "final_layer.linear"}
_MODULATED = {"norm_out.linear": "final_layer.adaLN_modulation.1~"}
_INPUTS = {"x_embedder": "img_in", "context_embedder": "txt_in"}

_FLUX = _blocks("transformer_blocks", "double_blocks", DOUBLE | _FLUX_NORMS)
_FLUX |= _blocks("single_transformer_blocks", "single_blocks", SINGLE | _FLUX_SINGLE)
_FLUX |= _INPUTS | _FINAL
_CHROMA = _FLUX | _blocks(
    "distilled_guidance_layer.layers",
    "distilled_guidance_layer.layers",
    {"linear_1": "in_layer", "linear_2": "out_layer"},
)
_CHROMA |= {"distilled_guidance_layer.norms.*.weight": "distilled_guidance_layer.norms.*.scale"}
_FLUX |= _MODULATED | _two("time_text_embed.timestep_embedder", "time_in")
_FLUX |= _two("time_text_embed.text_embedder", "vector_in") | _two("time_text_embed.guidance_embedder", "guidance_in")

_FLUX2 = _blocks(
    "transformer_blocks",
    "double_blocks",
    {key: value for key, value in DOUBLE.items() if key.startswith("attn")}
    | _FLUX_NORMS
    | {"ff.linear_in": "img_mlp.0", "ff.linear_out": "img_mlp.2"}
    | {"ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2"},
)
_FLUX2 |= _blocks(
    "single_transformer_blocks",
    "single_blocks",
    {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"} | _FLUX_SINGLE,
)
_FLUX2 |= _INPUTS | _FINAL | _MODULATED | _two("time_guidance_embed.timestep_embedder", "time_in")
_FLUX2 |= _two("time_guidance_embed.guidance_embedder", "guidance_in")
_FLUX2 |= {
    f"{each}.linear": f"{each}.lin"
    for each in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
}


def _tencent(names: Names) -> Names:
    """FLUX.1's names of a block, as in HunyuanVideo's project."""
    found = {}
    for key, value in names.items():
        there = re.sub(r"_(attn|mlp)\.(\w+)", lambda m: f"_{m[1]}{'_' if m[1] == 'attn' else '.'}{m[2]}", value)
        there = there.replace("mlp.0", "mlp.fc1").replace("mlp.2", "mlp.fc2")
        found[key] = re.sub(r"\.lin$", ".linear", there)
    return found


_HUNYUAN = _blocks(
    "transformer_blocks",
    "double_blocks",
    _tencent(DOUBLE)
    | _norms(False, "attn.norm_{}", "img_attn_{0}_norm")
    | _norms(True, "attn.norm_{}", "txt_attn_{0}_norm"),
)
_HUNYUAN |= _blocks(
    "single_transformer_blocks", "single_blocks", _tencent(SINGLE) | _norms(False, "attn.norm_{}", "{0}_norm")
)
_HUNYUAN |= _blocks(
    "context_embedder.token_refiner.refiner_blocks",
    "txt_in.individual_token_refiner.blocks",
    qkv("attn.to_{}", "self_attn_qkv")
    | {"attn.to_out.0": "self_attn_proj", "norm_out.linear": "adaLN_modulation.1"}
    | {"ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2", "norm1": "norm1", "norm2": "norm2"},
)
_HUNYUAN |= _FINAL | _MODULATED | _two("time_text_embed.timestep_embedder", "time_in", _FIRST_AND_THIRD)
_HUNYUAN |= _two("time_text_embed.guidance_embedder", "guidance_in", _FIRST_AND_THIRD)
_HUNYUAN |= _two("time_text_embed.text_embedder", "vector_in") | {"x_embedder.proj": "img_in.proj"}
_HUNYUAN |= _two("context_embedder.time_text_embed.timestep_embedder", "txt_in.t_embedder", _FIRST_AND_THIRD)
_HUNYUAN |= _two("context_embedder.time_text_embed.text_embedder", "txt_in.c_embedder", ("linear_1", "linear_2"))
_HUNYUAN |= {"context_embedder.proj_in": "txt_in.input_embedder"}

_SD3_BLOCK = qkv("attn.to_{}", "x_block.attn.qkv") | qkv("attn2.to_{}", "x_block.attn2.qkv")
_SD3_BLOCK |= qkv("attn.add_{}_proj", "context_block.attn.qkv")
for _here, _there in (("attn.norm_{}", "x_block.attn.ln_{0}"), ("attn2.norm_{}", "x_block.attn2.ln_{0}")):
    _SD3_BLOCK |= _norms(False, _here, _there)
_SD3_BLOCK |= _norms(True, "attn.norm_{}", "context_block.attn.ln_{0}")
_SD3_BLOCK |= {
    "attn.to_out.0": "x_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}
_SD3 = _blocks("transformer_blocks", "joint_blocks", _SD3_BLOCK) | _FINAL | _MODULATED
_SD3 |= {"transformer_blocks.last.norm1_context.linear": "joint_blocks.*.context_block.adaLN_modulation.1~"}
_SD3 |= {"pos_embed.pos_embed": "pos_embed", "pos_embed.proj": "x_embedder.proj"}
_SD3 |= _two("time_text_embed.timestep_embedder", "t_embedder", _FIRST_AND_THIRD)
_SD3 |= _two("time_text_embed.text_embedder", "y_embedder", _FIRST_AND_THIRD)

_LTX = {"proj_in": "patchify_proj", "time_embed.linear": "adaln_single.linear"}
_LTX |= _two("time_embed.emb.timestep_embedder", "adaln_single.emb.timestep_embedder", ("linear_1", "linear_2"))
_LTX |= _blocks(
    "transformer_blocks",
    "transformer_blocks",
    {f"attn{i}.norm_{each}": f"attn{i}.{each}_norm" for i in (1, 2) for each in "qk"},
)

_MOCHI = _blocks(
    "transformer_blocks",
    "blocks",
    MOCHI | _norms(False, "attn1.norm_{}", "attn.{0}_norm_x") | _norms(True, "attn1.norm_{}", "attn.{0}_norm_y"),
)
_MOCHI |= _FINAL | {"norm_out.linear": "final_layer.mod~", "patch_embed.proj": "x_embedder.proj"}
_MOCHI |= _two("time_embed.timestep_embedder", "t_embedder", _FIRST_AND_THIRD)
_MOCHI |= {f"time_embed.pooler.{each}": f"t5_y_embedder.{each}" for each in ("to_q", "to_kv", "to_out")}
_MOCHI |= {"time_embed.caption_proj": "t5_yproj"}

_AURA = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
_AURA_TEXT = {"add_q_proj": "q", "add_k_proj": "k", "add_v_proj": "v", "to_add_out": "o"}
_AURA_FF = {"linear_1": "c_fc1", "linear_2": "c_fc2", "out_projection": "c_proj"}
_AURAFLOW = _blocks(
    "joint_transformer_blocks",
    "double_layers",
    {f"attn.{key}": f"attn.w2{value}" for key, value in _AURA.items()}
    | {f"attn.{key}": f"attn.w1{value}" for key, value in _AURA_TEXT.items()}
    | {f"ff.{key}": f"mlpX.{value}" for key, value in _AURA_FF.items()}
    | {f"ff_context.{key}": f"mlpC.{value}" for key, value in _AURA_FF.items()}
    | {"norm1.linear": "modX.1", "norm1_context.linear": "modC.1"},
)
_AURAFLOW |= _blocks(
    "single_transformer_blocks",
    "single_layers",
    {f"attn.{key}": f"attn.w1{value}" for key, value in _AURA.items()}
    | {f"ff.{key}": f"mlp.{value}" for key, value in _AURA_FF.items()}
    | {"norm1.linear": "modCX.1"},
)
_AURAFLOW |= {"context_embedder": "cond_seq_linear", "proj_out": "final_linear", "norm_out.linear": "modF.1~"}
_AURAFLOW |= {"pos_embed.pos_embed": "positional_encoding", "pos_embed.proj": "init_x_linear"}
_AURAFLOW |= _two("time_step_proj", "t_embedder", _FIRST_AND_THIRD)

_LUMINA_NORMS = _norms(False, "attn.norm_{}", "attention.{0}_norm")
_LUMINA_NORMS |= {"norm1.norm": "attention_norm1", "norm2": "attention_norm2"}
_LUMINA = {
    key: value
    for each in ("layers", "noise_refiner", "context_refiner")
    for key, value in _blocks(each, each, LUMINA | _LUMINA_NORMS).items()
}
_LUMINA |= {"context_refiner.*.norm1": "context_refiner.*.attention_norm1"}
_LUMINA |= {f"time_caption_embed.caption_embedder.{i}": f"cap_embedder.{i}" for i in (0, 1)}
_LUMINA |= _two("time_caption_embed.timestep_embedder", "t_embedder", _FIRST_AND_THIRD)
_LUMINA |= {"norm_out.linear_1": "final_layer.adaLN_modulation.1", "norm_out.linear_2": "final_layer.linear"}

_WAN = _blocks(
    "blocks",
    "blocks",
    WAN
    | {f"attn{i}.norm_{each}": f"{there}_attn.norm_{each}" for i, there in ((1, "self"), (2, "cross")) for each in "qk"}
    | {"attn2.norm_added_k": "cross_attn.norm_k_img", "norm2": "norm3", "scale_shift_table": "modulation"},
)
_WAN |= {"scale_shift_table": "head.modulation", "proj_out": "head.head"}
_WAN |= _two("condition_embedder.text_embedder", "text_embedding", ("0", "2"))
_WAN |= _two("condition_embedder.time_embedder", "time_embedding", ("0", "2"))
_WAN |= {"condition_embedder.time_proj": "time_projection.1"}
_WAN |= {
    f"condition_embedder.image_embedder.{each}": f"img_emb.proj.{i}"
    for each, i in (("norm1", 0), ("ff.net.0.proj", 1), ("ff.net.2", 3), ("norm2", 4))
}

_Z_BLOCK = qkv("attention.to_{}", "attention.qkv")
_Z_BLOCK |= {"attention.to_out.0": "attention.out"} | _norms(False, "attention.norm_{}", "attention.{0}_norm")
_Z_IMAGE = {
    key: value
    for each in ("layers", "noise_refiner", "context_refiner")
    for key, value in _blocks(each, each, _Z_BLOCK).items()
}
_Z_IMAGE |= {"all_x_embedder.2-1": "x_embedder", "all_final_layer.2-1.linear": "final_layer.linear"}
_Z_IMAGE |= {"all_final_layer.2-1.adaLN_modulation.1": "final_layer.adaLN_modulation.1"}

_KREA_BLOCK = {f"attn.to_{each}": f"attn.w{each}" for each in "qkv"}
_KREA_BLOCK |= {"attn.to_out.0": "attn.wo", "attn.to_gate": "attn.gate"}
_KREA_BLOCK |= _norms(False, "attn.norm_{}.weight", "attn.qknorm.{0}norm.scale")
_KREA_BLOCK |= {"norm1.weight": "prenorm.scale", "norm2.weight": "postnorm.scale"}
_KREA_BLOCK |= {f"ff.{each}": f"mlp.{each}" for each in ("gate", "up", "down")}
_KREA2 = _blocks("transformer_blocks", "blocks", _KREA_BLOCK | {"scale_shift_table": "mod.lin="})
for _here in ("layerwise_blocks", "refiner_blocks"):
    _KREA2 |= _blocks(f"text_fusion.{_here}", f"txtfusion.{_here}", _KREA_BLOCK)
_KREA2 |= {"text_fusion.projector": "txtfusion.projector", "img_in": "first", "time_mod_proj": "tproj.1"}
_KREA2 |= {"txt_in.norm.weight": "txtmlp.0.scale", "txt_in.linear_1": "txtmlp.1", "txt_in.linear_2": "txtmlp.3"}
_KREA2 |= _two("time_embed", "tmlp", ("0", "2"))
_KREA2 |= {"final_layer.linear": "last.linear", "final_layer.norm.weight": "last.norm.scale"}
_KREA2 |= {"final_layer.scale_shift_table": "last.modulation.lin"}

_PIXART = _blocks(
    "transformer_blocks",
    "blocks",
    qkv("attn1.to_{}", "attn.qkv")
    | {"attn1.to_out.0": "attn.proj", "ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2"}
    | {"attn2.to_q": "cross_attn.q_linear", "attn2.to_out.0": "cross_attn.proj"}
    | {"attn2.to_k": "cross_attn.kv_linear#0", "attn2.to_v": "cross_attn.kv_linear#1"}
    | {"scale_shift_table": "scale_shift_table"},
)
_PIXART |= _FINAL | {"scale_shift_table": "final_layer.scale_shift_table", "pos_embed.proj": "x_embedder.proj"}
_PIXART |= {"adaln_single.linear": "t_block.1"} | _two("caption_projection", "y_embedder.y_proj", ("fc1", "fc2"))
for _here, _there in (("timestep", "t"), ("resolution", "csize"), ("aspect_ratio", "ar")):
    _PIXART |= _two(f"adaln_single.emb.{_here}_embedder", f"{_there}_embedder", _FIRST_AND_THIRD)

LAYOUTS: dict[str, Names] = {
    "AuraFlowTransformer2DModel": _AURAFLOW,
    "ChromaTransformer2DModel": _CHROMA,
    "Flux2Transformer2DModel": _FLUX2,
    "FluxTransformer2DModel": _FLUX,
    "HiDreamImageTransformer2DModel": {},
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
    "Kandinsky5Transformer3DModel": {},
    "Krea2Transformer2DModel": _KREA2,
    "LTXVideoTransformer3DModel": _LTX,
    "Lumina2Transformer2DModel": _LUMINA,
    "MochiTransformer3DModel": _MOCHI,
    "PixArtTransformer2DModel": _PIXART,
    "QwenImageTransformer2DModel": {},
    "SD3Transformer2DModel": _SD3,
    "WanTransformer3DModel": _WAN,
    "ZImageTransformer2DModel": _Z_IMAGE,
}
"""For each class the names of layers or parameters that differ. `*`: the first number in the name; `last`: the last
block. `#i`: part i of the rows of one layer in the file; `~`: the halves of its rows are swapped; `=`: it is flat."""


class Piece(NamedTuple):
    """A tensor of the file, made of the rows of `sources`; `linear`: the weight of a linear layer in a block."""

    name: str
    sources: tuple[str, ...]
    swapped: bool
    flat: bool
    linear: bool

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor, from the parameters by name."""
        parts = [tensors[source] for source in self.sources]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        joined = torch.cat(joined.chunk(2)[::-1]) if self.swapped else joined
        return joined.flatten() if self.flat else joined


def single_file_layout(spec: ModelSpec) -> list[Piece]:
    """The tensors of a model in one file. Raises UserError for a class without a known layout."""
    if spec.class_name not in LAYOUTS:
        raise UserError(
            f"--single-file: neither ComfyUI 0.33 nor diffusers reads {spec.class_name} from one file; leave it out"
        )
    model = outline(spec)
    sources: dict[str, dict[int, str]] = {}
    last = str(len(getattr(model, "transformer_blocks", ())) - 1)
    for name in model.state_dict():
        there, _, part = _place(LAYOUTS[spec.class_name], name, last).partition("#")
        sources.setdefault(there, {})[int(part or 0)] = name
    linear = set(_block_linears(model, spec))
    return [
        Piece(
            there.rstrip("~="),
            tuple(parts[i] for i in sorted(parts)),
            there.endswith("~"),
            there.endswith("="),
            parts[0] in linear,
        )
        for there, parts in sources.items()
    ]


def _place(names: Names, name: str, last: str) -> str:
    """The name of a parameter in the file, with its marks at the end."""
    module, _, leaf = name.rpartition(".")
    number = next(iter(re.findall(r"\.(\d+)\.", name)), "")
    for key, end in ((name, ""), (module, f".{leaf}")):
        for shape in (*(["last"] if number == last else []), "*", number):
            there = names.get(re.sub(r"\.\d+(?=\.|$)", f".{shape}", key, count=1))
            if there is not None:
                plain = re.split("[#~=]", there)[0]
                return f"{plain.replace('*', number)}{end}{there.removeprefix(plain)}"
    return name


def _block_linears(model: nn.Module, spec: ModelSpec) -> Iterator[str]:
    """The names of the weights of linear layers in blocks."""
    blocks = set(family(spec.class_name).blocks(model))
    within = tuple(f"{name}." for name, module in model.named_modules() if module in blocks)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith(within):
            yield f"{name}.weight"
