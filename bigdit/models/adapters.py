"""Trained adapters as files: safetensors in the layouts of diffusers' `load_lora_weights`, of peft and of ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from torch import nn

from bigdit.models import comfyui
from bigdit.models.build import outline
from bigdit.strategy import LoraSpec, ModelSpec

FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""peft's, of LoKr and LoHa; diffusers reads none."""
PREFIX = "transformer."  # pipelines tell a transformer's adapters from a text encoder's by it
ADAPTER = "default"  # peft's name of the only adapter, which files leave out
_DOWN = f".lora_A.{ADAPTER}.weight"


def patterns(spec: LoraSpec, layers: Iterable[str]) -> dict[str, dict[str, Any]]:
    """peft's names of layers of other ranks than most, with their alpha."""
    ranks = {layer: rank for layer in sorted(layers) if (rank := spec.rank_of(layer)) != spec.rank}
    return {"rank_pattern": ranks, "alpha_pattern": {layer: spec.alpha_of(rank) for layer, rank in ranks.items()}}


def save_adapters(folder: Path, spec: LoraSpec, weights: Mapping[str, torch.Tensor]) -> None:
    """Write adapters, by their names in the model, as diffusers reads them, or LoKr and LoHa as peft does. Raises
    OSError, SafetensorError.

    LoRA's B is multiplied by its scale, because most other loaders do not read that in the metadata.
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
    layers = {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in tensors}
    ranks = patterns(spec, layers)["rank_pattern"]
    config = {"r": spec.rank, "lora_alpha": spec.rank, "target_modules": sorted(layers), "use_dora": spec.dora}
    config |= {"rank_pattern": ranks, "alpha_pattern": ranks} if ranks else {}  # the scale is in B
    metadata = json.dumps({PREFIX + key: value for key, value in config.items()})
    save_file(tensors, folder / FILE, metadata={"format": "pt", "lora_adapter_metadata": metadata})


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
    """Write adapters in ComfyUI's layout, where ComfyUI has the model and cannot read diffusers' file.

    `base`: the frozen model, which only DoRA needs. Raises UserError where ComfyUI has no place for the model or a
    layer; what `base` raises; OSError, SafetensorError.
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
    """What of diffusers loads adapters of a class: its pipeline, or the class alone; None where nothing does."""
    if not hasattr(getattr(diffusers, class_name, None), "load_lora_adapter"):
        return None  # the pipeline's loader is for a U-Net
    if hasattr(getattr(diffusers, pipeline or "", None), "load_lora_weights"):
        return f"{pipeline}'s load_lora_weights"
    return f"{class_name}'s load_lora_adapter"


def _name_in_file(name: str) -> str:
    if ".lora_magnitude_vector." in name:  # a module in peft, a tensor in files
        name = name.removesuffix(f".{ADAPTER}.weight")
    return PREFIX + name.replace(f".{ADAPTER}.", ".")
