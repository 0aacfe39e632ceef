"""The files of weights that save_pretrained wrote, and what they take once they are loaded; without torch."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from bigdit.documents import indexed_files

_WEIGHTS = ("model.safetensors", "diffusion_pytorch_model.safetensors")  # of transformers, of diffusers
_SIZES = {"fp32": 4, "bf16": 2}


def weight_files(folder: Path) -> list[Path]:
    """Of a model's folder; none where it has none. Raises OSError or ValueError for an index that cannot be read."""
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return indexed_files(index)
        if (folder / name).is_file():
            return [folder / name]
    return []


def weights_bytes(folder: Path, dtype: str) -> int | None:
    """Bytes that the weights in a folder take once they are loaded in a dtype; None where there are none to read."""
    sizes = []
    try:
        for file in weight_files(folder):
            with safe_open(file, "np") as opened:  # their headers alone
                slices = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118  # it is no mapping
                sizes += [math.prod(each.get_shape()) * _itemsize(each.get_dtype(), dtype) for each in slices]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError):
        return None
    return sum(sizes) if sizes else None


def _itemsize(stored: str, dtype: str) -> int:
    """Bytes of a value that safetensors calls `stored`: floats are loaded in `dtype`."""
    if stored.startswith(("F", "BF")):
        return _SIZES[dtype]
    return {"BOOL": 1}.get(stored) or int(stored[1:]) // 8
