"""The paper's DiT in and out of the files that it was published in: one state dict, by the paper's names.

The names are those of `PaperDiT`, so that weights pass through bit by bit.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bigdit.errors import UserError
from bigdit.files import lfs_pointer, replacing
from bigdit.models.build import build
from bigdit.models.paper_dit import PaperDiT
from bigdit.spec import ModelSpec
from bigdit.units import how_many


def import_published(file: Path, spec: ModelSpec) -> PaperDiT:
    """The PaperDiT of `spec`, in fp32 on the host, with the weights in a published `.pt`, or in a `.safetensors`.

    A `.pt` is read by torch's restricted unpickler, that makes tensors and no other objects. Raises UserError
    where the file cannot be read, or holds another model; `spec` says the number of heads, which no tensor shows.
    """
    weights = _read(file)
    model = build(spec, device="meta", dtype=torch.float32)
    assert isinstance(model, PaperDiT)
    problems = _differences(file, weights, model)
    if problems:
        raise UserError(*problems)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return model


def export_published(model: PaperDiT, file: Path) -> None:
    """Write the weights of `model` as one `.safetensors` in the published layout, whole or not at all."""
    with replacing(file) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, temporary)


def _read(file: Path) -> dict[str, torch.Tensor]:
    if pointer := lfs_pointer(file):
        raise UserError(pointer)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} cannot be read as a state dict of tensors alone: {reason}") from None
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(f"{file} holds no state dict; a published DiT is one, by names such as pos_embed")
    return found


def _differences(file: Path, weights: dict[str, torch.Tensor], model: PaperDiT) -> list[str]:
    wanted = model.state_dict()
    missing, unexpected = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    problems = [
        f"{file} holds another model: {name} is {tuple(weights[name].shape)}, and {tuple(wanted[name].shape)} in "
        f"this PaperDiT"
        for name in sorted(wanted.keys() & weights.keys())
        if weights[name].shape != wanted[name].shape
    ][:3]
    for names, whose in (
        (missing, "this PaperDiT has and the file lacks"),
        (unexpected, "this PaperDiT does not have"),
    ):
        if names:
            count, first = how_many(len(names), "tensor"), ", ".join(sorted(names)[:3])
            problems.append(f"{file} holds another model: {count} {whose}: {first}")
    return problems
