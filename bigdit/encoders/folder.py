"""The folder that save_pretrained wrote: checked before a library is asked to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bigdit.documents import parse_json
from bigdit.encoders.weights import weight_files
from bigdit.errors import UserError
from bigdit.files import lfs_pointer
from bigdit.store.digest import weights_digest
from bigdit.units import how_many

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_config(key: str, folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder; `key` names the run's setting in errors, which are UserErrors."""
    check_pulled(key, folder)
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except OSError as error:
        raise UserError(
            f"{key}: {folder / 'config.json'} cannot be read ({error.strerror}); "
            "a folder of save_pretrained was expected"
        ) from None
    except ValueError as error:
        raise UserError(f"{key}: {folder / 'config.json'} is {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{key}: {folder / 'config.json'} should hold a JSON object")
    return config


def check_pulled(key: str, folder: Path) -> None:
    """Raise UserError where a file of the folder is a pointer of Git LFS, of which libraries say something else."""
    if pointer := lfs_pointer(folder):
        raise UserError(f"{key}: {pointer}")


def check_complete(key: str, folder: Path, info: Mapping[str, Sequence[object]]) -> None:
    """Raise UserError where weights were missing or of another shape: the libraries would draw them at random."""
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info[problem])
        if names:
            what = problem.removesuffix("_keys")
            raise UserError(f"{key}: {folder} has {how_many(len(names), f'{what} weight')}, the first {names[0]}")


def weights_sample(folder: Path, dtype: str) -> str | None:
    """The first row of each tensor that a folder holds, in the dtype that it is used in, as hex of xxh3-128.

    It tells other weights of the same model without reading them all: training of any kind changes most tensors.
    None where there are none to read.
    """
    rows: dict[str, torch.Tensor] = {}
    try:
        for file in weight_files(folder):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    tensor = opened.get_slice(name)
                    row = tensor[:1] if tensor.get_shape() else opened.get_tensor(name)
                    rows[name] = row.to(DTYPES[dtype]) if row.is_floating_point() else row
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError):
        return None
    return weights_digest(rows) if rows else None
