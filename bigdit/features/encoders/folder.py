"""The folder that save_pretrained wrote: checked before a library is asked to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bigdit.documents import parse_json
from bigdit.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_config(key: str, folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder; `key` names the run's setting in errors, which are UserErrors."""
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


def check_complete(key: str, folder: Path, info: Mapping[str, Sequence[object]]) -> None:
    """Raise UserError where weights were missing or of another shape: the libraries would draw them at random."""
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info[problem])
        if names:
            what = problem.removesuffix("_keys")
            raise UserError(f"{key}: {folder} has {len(names)} {what} weights, the first {names[0]}")
