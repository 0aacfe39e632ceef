"""The paper's DiT in and out of the files that it was published in: one state dict, by the paper's names.

The names are those of `PaperDiT`, so that weights pass through bit by bit.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bigdit.errors import UserError
from bigdit.files import check_regular, lfs_pointer, replacing
from bigdit.models.build import build
from bigdit.models.paper_dit import PaperDiT
from bigdit.strategy import ModelSpec
from bigdit.units import how_many


def import_published(file: Path, spec: ModelSpec) -> PaperDiT:
    """The PaperDiT of `spec`, in fp32 on the host, with the published weights in a `.safetensors`.

    Raises UserError where the file cannot be read, or holds another model; `spec` says the number of heads, which no
    tensor shows. A published `.pt` is a pickle, and no pickle is read.
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
    if file.suffix != ".safetensors":
        raise UserError(f"{file} is no .safetensors, and pickles are not read; save its tensors with safetensors.torch")
    if pointer := lfs_pointer(file):
        raise UserError(pointer)
    try:
        check_regular(file)
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}") from None


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
