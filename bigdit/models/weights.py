"""Weights of a diffusers folder, read a file at a time: never a second copy of the model, nor one in fp32."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from bigdit.documents import indexed_files
from bigdit.files import check_regular, leads_out, lfs_pointer

_FILE = "diffusion_pytorch_model.safetensors"


def lacking(folder: Path) -> str | None:
    """What keeps a folder from being one of diffusers' weights; None where it has their files."""
    if not folder.is_dir():
        return "it is no folder; name one of diffusers, or a checkpoint"
    if not (folder / "config.json").is_file():
        within = folder / "transformer"
        return f"it has no config.json{f'; {within} has' if (within / 'config.json').is_file() else ''}"
    if not (folder / _FILE).exists() and not _index(folder).exists():
        return f"it has no {_FILE}"
    return lfs_pointer(folder)


def fill(model: nn.Module, folder: Path, *, dtype: torch.dtype) -> tuple[int, int]:
    """Give the model its tensors by their names, in `dtype`; how many the folder lacks, and how many it has beside.

    What is in `dtype` already stays mapped: the pages of its file, which all processes share until they write to them.
    Raises OSError, ValueError or RuntimeError where a file cannot be read, or a tensor has another shape.
    """
    lacking, beside = set(model.state_dict()), set()
    for file in _files(folder):
        check_regular(file)
        if leads_out(folder, file):
            raise OSError(f"{file.name} is a link out of its folder; copy there what it leads to")
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise OSError(f"{file.name}: {error}") from error
        rounded = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
        found = model.load_state_dict(rounded, strict=False, assign=True)
        beside.update(found.unexpected_keys)
        lacking -= tensors.keys()
    return len(lacking), len(beside)


def _files(folder: Path) -> list[Path]:
    index = _index(folder)
    return indexed_files(index) if index.exists() else [folder / _FILE]


def _index(folder: Path) -> Path:
    return folder / f"{_FILE}.index.json"
