"""Weights in one file, in the names of a model's original project or of ComfyUI, by diffusers' own converters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file

from bigdit.errors import UserError

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""Of a transformer in a file: others hold the VAE and text encoders that some files have too."""
_SCALES = ("scale_weight", "weight_scale")
_UNUSED = (*_SCALES, "scale_input", "input_scale", "scaled_fp8", "comfy_quant")
"""What ComfyUI stores beside weights in fp8."""


def read_single_file(
    class_name: str, file: Path, wanted: Mapping[str, Any], *, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of a file by diffusers' names, in `dtype`. `wanted`: the model's, by name.

    Raises UserError where diffusers has no converter, or the file is of another model.
    """
    tensors = dequantised(load_file(file), dtype)
    prefix = next((each for each in _PREFIXES if any(name.startswith(each) for name in tensors)), "")
    tensors = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    if wanted.keys() <= tensors.keys():
        return tensors
    if class_name not in SINGLE_FILE_LOADABLE_CLASSES:
        raise UserError(f"diffusers converts no single file of {class_name}; take its folder in diffusers' format")
    first, convert = next(iter(tensors), "none"), SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"]
    try:
        converted = convert(checkpoint=tensors, config={})
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
        raise UserError(f"diffusers finds none of it there; its first tensor is {first}") from None
    return {name: each for name, each in converted.items() if each is not None}


def dequantised(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floating-point tensors in `dtype`, those in fp8 times their scales. Raises UserError for other quantisation."""
    found = {}
    for name, tensor in tensors.items():
        parent, _, last = name.rpartition(".")
        if last in _UNUSED:
            continue
        scales = [
            tensors[key] for key in (f"{parent}.{each}" for each in _SCALES) if last == "weight" and key in tensors
        ]
        if scales and not tensor.is_floating_point():
            raise UserError(
                f"{name} is quantised in {str(tensor.dtype).removeprefix('torch.')}; fp8, 16 and 32 bits are read"
            )
        if scales:
            scale = scales[0].float()
            tensor = tensor.float() * (scale.view(-1, *[1] * (tensor.ndim - 1)) if scale.numel() > 1 else scale)
        found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return found
