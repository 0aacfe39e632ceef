"""Files of LoRA weights. They are saved in the layouts of diffusers' `load_lora_weights` and of ComfyUI. A run may
start from names of diffusers, ComfyUI and kohya's scripts, and from other ranks.

Diffusers' pipelines convert names that neither the model nor ComfyUI has, as their own loaders do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from torch import nn

from bigdit.catalog.families import PIPELINES
from bigdit.catalog.models import models
from bigdit.errors import UserError
from bigdit.models import comfyui
from bigdit.models.build import outline
from bigdit.models.comfyui import Adapter
from bigdit.strategy import LoraSpec, ModelSpec
from bigdit.units import how_many

FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""peft's files, for LoKr and LoHa, which diffusers does not read."""
PREFIX = "transformer."  # pipelines tell a transformer's adapters from a text encoder's by it
TEXT_ENCODERS = "text_encoders"
"""The module of a model that holds the text encoders whose adapters are trained, by their names in a pipeline."""
TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")
ADAPTER = "default"  # peft's name of the only adapter, which files leave out
_DOWN = f".lora_A.{ADAPTER}.weight"


def patterns(spec: LoraSpec, layers: Iterable[str]) -> dict[str, dict[str, Any]]:
    """peft's settings for layers whose ranks differ from `spec.rank`, with their alpha."""
    ranks = {layer: rank for layer in sorted(layers) if (rank := spec.rank_of(layer)) != spec.rank}
    return {"rank_pattern": ranks, "alpha_pattern": {layer: spec.alpha_of(rank) for layer, rank in ranks.items()}}


def save_adapters(folder: Path, spec: LoraSpec, weights: Mapping[str, torch.Tensor]) -> None:
    """Write adapters, by their names in the model, in diffusers' layout; LoKr and LoHa in peft's.

    LoRA's B is multiplied by its scale, because most other loaders do not read it from the metadata. Raises OSError,
    SafetensorError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if spec.kind != "lora":
        parts = by_layer(weights)
        named = {f"base_model.model.{layer}.{part}": each for layer, own in parts.items() for part, each in own.items()}
        save_file(named, folder / PEFT_FILE, metadata={"format": "pt"})
        described: dict[str, Any] = {"peft_type": spec.kind.upper(), "r": spec.rank, "alpha": spec.alpha}
        described |= {"target_modules": sorted(parts), **patterns(spec, parts)}
        (folder / PEFT_CONFIG).write_text(json.dumps(described, indent=2) + "\n")
        return
    tensors = {_name_in_file(name): _scaled(name, tensor, spec).contiguous() for name, tensor in weights.items()}
    layers = {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in tensors if name.startswith(PREFIX)}
    ranks = patterns(spec, layers)["rank_pattern"]
    config = {"r": spec.rank, "lora_alpha": spec.rank, "target_modules": sorted(layers), "use_dora": spec.dora}
    config |= {"rank_pattern": ranks, "alpha_pattern": ranks} if ranks else {}  # the scale is in B
    described = {PREFIX + key: value for key, value in config.items()}
    own = {"r": spec.rank, "lora_alpha": spec.rank, "target_modules": [*TEXT_TARGETS]}
    for encoder in sorted({name.split(".")[0] for name in tensors if not name.startswith(PREFIX)}):
        described |= {f"{encoder}.{key}": value for key, value in own.items()}
    metadata = json.dumps(described)
    save_file(tensors, folder / FILE, metadata={"format": "pt", "lora_adapter_metadata": metadata})


def principal(weight: torch.Tensor, rank: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B, in fp32, whose product times `scale` is the best approximation of a weight at that rank.

    They are computed from the weight in bf16 and rounded to bf16, so that they are the same in all precisions. The
    singular vectors are from a randomised SVD with four power iterations (Halko et al., arXiv:0909.4061); a full one
    takes a CPU an hour.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        some = min(rank + 16, *weight.shape)
        left, values, right = torch.svd_lowrank(weight.bfloat16().float(), q=some, niter=4)
    left, right, root = left[:, :rank], right[:, :rank], (values[:rank] / scale).sqrt()
    down, up = weight.new_zeros(rank, weight.shape[1]), weight.new_zeros(weight.shape[0], rank)
    down[: len(root)], up[:, : len(root)] = (root * right).T, root * left
    return down.bfloat16().float(), up.bfloat16().float()


def of_plain_weights(
    spec: LoraSpec, weights: Mapping[str, torch.Tensor], base: nn.Module
) -> tuple[LoraSpec, dict[str, torch.Tensor]]:
    """PiSSA's adapters as a LoRA of twice the rank for the original weights of `base`.

    It is the adapters minus their start. Its scale is in B.
    """
    found = dict(weights)
    for name in (name for name in weights if name.endswith(_DOWN)):
        up = name.replace(".lora_A.", ".lora_B.")
        scale = spec.scale(rank := len(weights[name]))
        first = principal(base.get_parameter(f"{name.removesuffix(_DOWN)}.weight").detach(), rank, scale)
        found[name] = torch.cat([weights[name], first[0]])
        found[up] = torch.cat([weights[up] * scale, first[1] * -scale], dim=1)
    ranks = {layer: 2 * rank for layer, rank in spec.ranks.items()}
    changed = {"rank": 2 * spec.rank, "ranks": ranks, "alpha": 2.0 * spec.rank, "rslora": False, "pissa": False}
    return spec.model_copy(update=changed), found


def by_layer(weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The parts of LoKr's and LoHa's adapters by layer: lokr_w1, hada_w1_a and so on."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        layer, part, _ = name.rsplit(".", 2)
        found.setdefault(layer, {})[part] = tensor
    return found


def save_for_comfyui(
    folder: Path, model: ModelSpec, spec: LoraSpec, weights: Mapping[str, torch.Tensor], base: Callable[[], nn.Module]
) -> None:
    """Write adapters in ComfyUI's layout, if ComfyUI has the model and cannot read diffusers' file.

    `base`: returns the frozen model, for DoRA. Raises UserError if ComfyUI does not have the model or a layer; what
    `base` raises; OSError, SafetensorError.
    """
    if not comfyui.needed(model.class_name, dora=spec.dora) and spec.kind == "lora":
        return
    linears = {name: each for name, each in outline(model).named_modules() if isinstance(each, nn.Linear)}
    rows = {name: each.out_features for name, each in linears.items()}
    if spec.kind != "lora":
        products = comfyui.PRODUCTS[spec.kind](model.class_name, by_layer(weights), rows, spec.scale(spec.rank))
        save_file(products, folder / comfyui.FILE, metadata={"format": "pt"})
        return
    adapters = {
        name.removesuffix(_DOWN): comfyui.Adapter(
            down,
            _scaled(up := name.replace(".lora_A.", ".lora_B."), weights[up], spec),
            weights.get(name.replace(".lora_A.", ".lora_magnitude_vector.")),
        )
        for name, down in weights.items()
        if name.endswith(_DOWN)
    }
    frozen = dict(base().named_parameters()) if spec.dora else {}
    tensors = comfyui.tensors(model.class_name, adapters, rows, lambda name: frozen[f"{name}.weight"].detach())
    save_file(tensors, folder / comfyui.FILE, metadata={"format": "pt"})


def _scaled(name: str, tensor: torch.Tensor, spec: LoraSpec) -> torch.Tensor:
    return tensor * spec.scale(tensor.shape[1]) if ".lora_B." in name else tensor


def loaded_by(class_name: str, pipeline: str | None) -> str | None:
    """The method of diffusers that loads adapters of a class; None without one."""
    if not hasattr(getattr(diffusers, class_name, None), "load_lora_adapter"):
        return None  # the pipeline's loader is for a U-Net
    if hasattr(getattr(diffusers, pipeline or "", None), "load_lora_weights"):
        return f"{pipeline}'s load_lora_weights"
    return f"{class_name}'s load_lora_adapter"


def _name_in_file(name: str) -> str:
    if name.startswith(f"{TEXT_ENCODERS}."):
        _, encoder, layer = name.split(".", 2)
        return f"{encoder}.text_model.{layer.replace(f'.{ADAPTER}.', '.')}"
    if ".lora_magnitude_vector." in name:  # a module in peft, a tensor in files
        name = name.removesuffix(f".{ADAPTER}.weight")
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


_PREFIXES = re.compile(
    r"^((base_model\.model|transformer|(model\.)?diffusion_model|unet|module)\.|lora_unet_|lora_transformer_|lycoris_)*"
)
_PART = re.compile(
    r"(?P<layer>.+?)[._](?P<kind>lora(_linear_layer)?[._](A|B|down|up)|lora_magnitude_vector)(\.default)?(\.weight)?$"
    r"|(?P<other>.+)\.(?P<rest>alpha|dora_scale)$"
)
_KINDS = {"A": "down", "down": "down", "B": "up", "up": "up", "vector": "magnitudes"}
_OTHER_KINDS = {"lokr": "LoKr", "hada": "LoHa", "oft": "OFT", "diff": "whole differences"}


def read_adapters(
    spec: ModelSpec, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, Adapter]:
    """Adapters by the model's layers, with their scale in `up`.

    `config`: peft's, if the file has it; tensors named alpha come first. Raises UserError for a tensor that is not of
    LoRA, or of no layer of the model.
    """
    linears = _linears(spec)
    if any(_XLABS.search(name) for name in tensors):
        tensors = diffusers.FluxPipeline.lora_state_dict(dict(tensors))
    places = _places(spec.class_name, linears)
    parts = _in_own_names(spec.class_name, _parts(tensors, config), places)
    found: dict[str, Adapter] = {}
    for layer, part in parts.items():
        if _plain(layer) not in places:
            raise UserError(f"its layer {layer} is none of {spec.class_name}: {_owner(parts)}")
        for name, rows in places[_plain(layer)]:
            if problem := _misfit(name, part, rows, linears[name]):
                raise UserError(f"its layer {layer} is {problem}: {_owner(parts)}")
            found[name] = _adapter(part, rows)
    if not found:
        raise UserError("it holds no LoRA of the transformer")
    return found


def start_adapters(model: nn.Module, lora: LoraSpec, adapters: Mapping[str, Adapter]) -> list[str]:
    """Fill the model's new adapters, and return what to log. A higher rank is reduced by SVD, a lower one is exact.

    Raises UserError if the run does not adapt one of the layers, or if only the file or only the run has magnitudes.
    """
    trained = {name: each for name, each in model.named_parameters() if not name.startswith(f"{TEXT_ENCODERS}.")}
    if lora.kind != "lora":
        raise UserError(f"LoRA is read, and strategy.lora.kind is {lora.kind}; set it to lora")
    left_out = [name for name in adapters if f"{name}.lora_A.{ADAPTER}.weight" not in trained]
    if left_out:
        ends = sorted({last_name(name) for name in adapters})
        raise UserError(
            f"it adapts {left_out[0]}, and strategy.lora.targets leaves that out; set strategy.lora.targets to "
            f"[{', '.join(ends)}]"
        )
    if lora.dora != any(each.magnitudes is not None for each in adapters.values()):
        has, fix = ("no magnitudes", "false") if lora.dora else ("magnitudes (DoRA)", "true")
        raise UserError(f"it has {has}; set strategy.lora.dora to {fix}")
    if lora.pissa:
        raise UserError(
            "strategy.lora.pissa starts from the weights below; set it to false, or leave model.lora_from out"
        )
    lost = [0.0, 0.0]
    with torch.no_grad():
        for name, each in adapters.items():
            down, up = (trained[f"{name}.lora_{kind}.{ADAPTER}.weight"] for kind in "AB")
            kept, (missing, whole) = _reduced(each, len(down))
            lost = [lost[0] + missing, lost[1] + whole]
            rank = len(kept.down)
            down[:rank].copy_(kept.down)  # rows beyond it stay as they were drawn, and their columns of B are zeros
            up.zero_()[:, :rank].copy_(kept.up / lora.scale(len(down)))
            if each.magnitudes is not None:
                trained[f"{name}.lora_magnitude_vector.{ADAPTER}.weight"].copy_(each.magnitudes)
    return list(_notices(trained, adapters, lora, math.sqrt(lost[0] / max(lost[1], 1e-30))))


def rank_notices(model: nn.Module) -> list[str]:
    """A line if ranks are above the smaller side of their layers."""
    sides: list[tuple[int, int, str]] = []
    for name, down in model.named_parameters():
        if name.endswith(_DOWN):
            up = model.get_parameter(name.replace(".lora_A.", ".lora_B."))
            side = min(down.shape[1], len(up))
            sides += [(side, len(down), name.removesuffix(_DOWN))] if len(down) > side else []
    if not sides:
        return []
    side, rank, name = min(sides)
    small = f"the smallest of {how_many(len(sides), 'layer')} below its rank"
    return [f"strategy.lora: rank {rank} is set, and above {side} it adds nothing to {name}, {small}"]


_TEXT_LAYER = re.compile(r"(text_encoders\.)?((?P<own>text_encoder(_2)?)\.|lora_te(?P<number>[12])_)(text_model[._])?")


def start_text_adapters(
    model: nn.Module, lora: LoraSpec, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> list[str]:
    """`start_adapters` for the model's text encoders, from names of a checkpoint, diffusers or kohya's scripts.

    Returns what to log. Raises UserError for another layer.
    """
    inner = model.get_submodule(TEXT_ENCODERS)
    linears: dict[str, Any] = {name: each for name, each in inner.named_modules() if hasattr(each, "lora_A")}
    places = {_plain(name): name for name in linears}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TEXT_LAYER.match(name)
        encoder = "text_encoder_2" if match and "2" in (match["own"] or match["number"]) else "text_encoder"
        found.setdefault(encoder, {})[f"{encoder}.{name[match.end() :]}" if match else name] = tensor
    adapters = {}
    for encoder, own in found.items():
        prefix = f"{encoder}."
        settings = {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}
        for layer, part in _parts(own, settings).items():
            place = places.get(_plain(layer))
            if place is None:
                raise UserError(f"its layer {layer} is none of the text encoders' that the run adapts")
            rows = (0, count := linears[place].out_features, count, False)
            if problem := _misfit(place, part, rows, linears[place]):
                raise UserError(f"its layer {layer} is {problem}: it is of another model")
            adapters[place] = _adapter(part, rows)
    return start_adapters(inner, lora, adapters)


def _notices(trained: Mapping[str, Any], adapters: Mapping[str, Adapter], lora: LoraSpec, lost: float) -> list[str]:
    ranks = sorted({len(each.down) for each in adapters.values()})
    start = "start" if len(adapters) > 1 else "starts"
    found = [f"model.lora_from: {how_many(len(adapters), 'layer')} {start} from it"]
    if any(len(each.down) > lora.rank_of(name) for name, each in adapters.items()):
        change = "some ranks became the run's" if lora.ranks else f"rank {ranks[-1]} became {lora.rank}"
        found.append(f"model.lora_from: {change} by SVD; {lost:.1%} of its length is lost")
    new = sum(f".lora_A.{ADAPTER}." in name for name in trained) - len(adapters)
    if new:
        found.append(f"model.lora_from: {how_many(new, 'layer')} of this run are not in it, and start as new ones")
    return found


def last_name(name: str) -> str:
    """A layer's name from its last part that is not a number."""
    return re.sub(r"^.*?([^.]*[^.\d][^.]*(\.\d+)*)$", r"\1", name)


def _plain(layer: str) -> str:
    of_processor = layer.replace(".processor.to_out", ".to_out.0").replace(".processor.", ".")  # old names
    return _PREFIXES.sub("", of_processor).replace(".", "_").rstrip("_")


def _parts(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """For each layer of the file: down, up with its scale, and magnitudes, in fp32."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _PART.fullmatch(name)
        if match is None:
            kind = next((words for key, words in _OTHER_KINDS.items() if re.search(rf"[._]{key}", name)), None)
            fix = "merge it into the weights of model.init_from"
            raise UserError(
                f"its tensor {name} is of {kind}, and LoRA was expected; {fix}"
                if kind
                else f"its tensor {name} is of no LoRA; whole weights are named in model.init_from"
            )
        kind = match["rest"] or _KINDS[re.split(r"[._]", match["kind"])[-1]]
        parts.setdefault(match["layer"] or match["other"], {})[kind] = (
            tensor.float().flatten(1) if tensor.ndim > 2 else tensor.float()
        )
    for layer, part in parts.items():
        if "dora_scale" in part:
            raise UserError(f"{layer} has a dora_scale, which depends on the weights below; take diffusers' file of it")
        if not {"down", "up"} <= part.keys() or not part["down"].numel():
            raise UserError(f"{layer} lacks one of its two matrices")
        if part["down"].ndim < 2 or part["up"].ndim < 2 or len(part["down"]) != part["up"].shape[1]:
            raise UserError(f"{layer} has {[*part['down'].shape]} and {[*part['up'].shape]}, which do not multiply")
        rank = len(part["down"])
        alpha = _alpha(layer, part.pop("alpha", None), config, rank)
        if not all(tensor.isfinite().all() for tensor in part.values()):
            raise UserError(f"{layer} holds NaN or infinity; take a file of an earlier step")
        if not 0 < alpha < math.inf:
            raise UserError(f"{layer} has an alpha of {alpha:g}, and a number above 0 was expected")
        part["up"] = part["up"] * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    return parts


def _alpha(layer: str, own: torch.Tensor | None, config: Mapping[str, Any], rank: int) -> float:
    """Its tensor's value, or peft's, or the rank; NaN if that is no number. peft's names lack prefixes of the file."""
    try:
        if own is not None:
            return own.item()
        ends = (each for name, each in config.get("alpha_pattern", {}).items() if f".{layer}".endswith(f".{name}"))
        given = next(ends, config.get("lora_alpha"))
        return float(rank if given is None else given)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return math.nan


Rows = tuple[int, int, int, bool]
"""A layer's rows in one of the file: (first, number, number of all), and whether the halves are swapped."""


def _places(class_name: str, linears: Mapping[str, nn.Linear]) -> dict[str, list[tuple[str, Rows]]]:
    """For each plain name of a layer in files: the model's layers, and their rows in it."""
    places = {
        _plain(name): [(name, (0, each.out_features, each.out_features, False))] for name, each in linears.items()
    }
    for layer, names in comfyui.layers(class_name, linears).items():
        parent, _, there = layer.removesuffix("~").rpartition(".")
        if "|" in there:
            continue  # two layers in the file: their adapters cannot become one exactly
        counts = [linears[name].out_features for name in names]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        own = [
            (name, (start, count, sum(counts), layer.endswith("~")))
            for name, start, count in zip(names, starts, counts, strict=True)
        ]
        places.setdefault(_plain(f"{parent}.{there}"), own)
    return places


def _linears(spec: ModelSpec) -> dict[str, nn.Linear]:
    return {name: each for name, each in outline(spec).named_modules() if isinstance(each, nn.Linear)}


_XLABS = re.compile(r"blocks\.\d+\.processor\.(qkv|proj)_lora")
_U_NET = re.compile(r"(down|mid|up|input|middle|output)_blocks?[._]")


def _owner(parts: Parts) -> str:
    """Which model of the catalogue has these layers, and what to do."""
    if any(_U_NET.search(layer) for layer in parts):
        return "it is of a U-Net, such as that of SDXL; take a LoRA of this model"
    sides = {side for part in parts.values() for side in (len(part["up"]), part["down"].shape[1])}
    for model in models():
        if not model.trainable or _width(model.spec) not in (None, *sides):
            continue  # to outline a model takes a tenth of a second
        places = _places(model.spec.class_name, linears := _linears(model.spec))
        own = {_plain(layer): part for layer, part in _in_own_names(model.spec.class_name, parts, places).items()}
        if own.keys() <= places.keys() and not any(
            _misfit(name, part, rows, linears[name]) for layer, part in own.items() for name, rows in places[layer]
        ):
            return f"its layers are those of {model.name}; set model.name to that, or take a LoRA of this model"
    return "it is of another model, or in names that are not read; take a file in diffusers' names"


def _width(spec: ModelSpec) -> int | None:
    """The width of its blocks, if the catalogue has it. It is a side of all layers of attention."""
    heads, channels, whole = (
        spec.kwargs.get(key) for key in ("num_attention_heads", "attention_head_dim", "hidden_size")
    )
    return heads * channels if heads and channels else whole


def _misfit(name: str, part: Mapping[str, torch.Tensor], rows: Rows, linear: nn.Linear) -> str | None:
    """The size of an adapter beside that of its layer in the model; None if they agree."""
    size, own = (len(part["up"]), part["down"].shape[1]), (rows[2], linear.in_features)
    return None if size == own else f"{size[0]} × {size[1]}, and {name} of the model {own[0]} × {own[1]}"


def _adapter(part: Mapping[str, torch.Tensor], rows: Rows) -> Adapter:
    first, count, _, turned = rows
    down, up, magnitudes = part["down"], part["up"], part.get("magnitudes")
    up = torch.cat(up.chunk(2)[::-1]) if turned else up
    return Adapter(down, up[first : first + count], magnitudes)


Parts = Mapping[str, Mapping[str, torch.Tensor]]


def _in_own_names(class_name: str, parts: Parts, places: Mapping[str, Any]) -> Parts:
    """The parts, with names that the pipeline's loader gives them if only those are all among `places`."""
    found = parts
    for prefix in (None, "lora_unet_"):
        if any(_plain(layer) not in places for layer in found):
            with suppress(Exception):  # of any class, where a converter expects other names
                found = _parts(_converted(class_name, found, prefix), {})
    return found if found and all(_plain(layer) in places for layer in found) else parts


def _converted(class_name: str, parts: Parts, prefix: str | None) -> dict[str, torch.Tensor]:
    """The tensors in diffusers' names, converted by the pipeline of the class; with `prefix`, from kohya's names."""
    known = PIPELINES.get(class_name) or re.sub("Transformer[23]DModel$", "Pipeline", class_name)
    kinds = ("lora_up", "lora_down") if prefix else ("lora_B", "lora_A")
    tensors: dict[str, torch.Tensor] = {}
    for layer, part in parts.items():
        name = f"{prefix}{_plain(layer)}" if prefix else layer
        tensors |= {f"{name}.{kind}.weight": part[own] for kind, own in zip(kinds, ("up", "down"), strict=True)}
        if prefix:
            tensors[f"{name}.alpha"] = torch.tensor(float(len(part["down"])))  # the scale is in `up`
    found: dict[str, torch.Tensor] = getattr(diffusers, known).lora_state_dict(tensors)
    return found


def _reduced(adapter: Adapter, rank: int) -> tuple[Adapter, tuple[float, float]]:
    """The nearest adapter of that rank (Eckart and Young, 1936), and the squared norms of the lost part and of all."""
    if len(adapter.down) <= rank:
        return adapter, (0.0, 0.0)
    of_up, up = torch.linalg.qr(adapter.up)
    of_down, down = torch.linalg.qr(adapter.down.T)
    left, lengths, right = torch.linalg.svd(up @ down.T)
    signs = left.gather(0, left.abs().argmax(0, keepdim=True)).sign()  # the same on all machines
    roots = lengths[:rank].sqrt()
    reduced = Adapter(
        (right[:rank] * signs.T[:rank] * roots[:, None]) @ of_down.T,
        of_up @ (left[:, :rank] * signs[:, :rank] * roots),
        adapter.magnitudes,
    )
    return reduced, (lengths[rank:].square().sum().item(), lengths.square().sum().item())
