"""Trained adapters as files: safetensors in the layout that diffusers' `load_lora_weights` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from bigdit.errors import UserError
from bigdit.spec import LoraSpec

FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."  # pipelines tell a transformer's adapters from a text encoder's by it
ADAPTER = "default"  # as peft names the only adapter; files do not say it


def save_adapters(folder: Path, spec: LoraSpec, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write adapters, by their names in the model, with their rank and alpha. Raises OSError, SafetensorError."""
    tensors = {_name_in_file(name): tensor.contiguous() for name, tensor in weights}
    layers = {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in tensors}
    config = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": sorted(layers)}
    described = json.dumps({PREFIX + key: value for key, value in config.items()})
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt", "lora_adapter_metadata": described})


@torch.no_grad()
def load_adapters(model: nn.Module, folder: Path) -> None:
    """Put saved adapters into an equipped model. Raises UserError where they are not those of its layers."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    wanted = {_name_in_file(name): parameter for name, parameter in trained}
    try:
        with safe_open(folder / FILE, framework="pt") as opened:
            saved = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / FILE} does not hold adapters: {error}") from None
    common = saved.keys() & wanted.keys()
    different = sorted(saved.keys() ^ wanted.keys() | {k for k in common if saved[k].shape != wanted[k].shape})
    if different:
        raise UserError(
            f"{folder / FILE} holds other adapters: {len(different)} tensors differ in name or shape, such as "
            f"{different[0]}; set train.lora.rank and train.lora.targets as they were"
        )
    for name, parameter in wanted.items():
        parameter.copy_(saved[name])


def _name_in_file(name: str) -> str:
    return PREFIX + name.replace(f".{ADAPTER}.", ".")
