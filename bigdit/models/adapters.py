"""Trained adapters as files: safetensors in the layout that diffusers' `load_lora_weights` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file

from bigdit.spec import LoraSpec

FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."  # pipelines tell a transformer's adapters from a text encoder's by it
ADAPTER = "default"  # as peft names the only adapter; files do not say it


def save_adapters(folder: Path, spec: LoraSpec, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write adapters, by their names in the model, with their rank and alpha. Raises OSError, SafetensorError."""
    tensors = {_name_in_file(name): tensor.contiguous() for name, tensor in weights}
    layers = {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in tensors}
    config = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": sorted(layers), "use_dora": spec.dora}
    described = json.dumps({PREFIX + key: value for key, value in config.items()})
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt", "lora_adapter_metadata": described})


def loaded_by(class_name: str, pipeline: str | None) -> str | None:
    """What of diffusers loads adapters of a class: its pipeline, or it alone; None where nothing does."""
    if not hasattr(getattr(diffusers, class_name, None), "load_lora_adapter"):
        return None  # whatever the pipeline has is a U-Net's
    if hasattr(getattr(diffusers, pipeline or "", None), "load_lora_weights"):
        return f"{pipeline}'s load_lora_weights"
    return f"{class_name}'s load_lora_adapter"


def _name_in_file(name: str) -> str:
    if ".lora_magnitude_vector." in name:  # a module in peft, a tensor in files
        name = name.removesuffix(f".{ADAPTER}.weight")
    return PREFIX + name.replace(f".{ADAPTER}.", ".")
