"""Safetensors files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from bigdit.files import replacing


def commit_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to `path` as a whole. Raises UserError where the disk is full or cannot be written.

    The same tensors give the same bytes, as long as `metadata` has one key: safetensors orders several at will.
    """
    with replacing(path) as temporary:
        # Not save_file: it makes files that only their owner can read, whatever the umask, and its errors for
        # a full disk are not OSErrors.
        temporary.write_bytes(save(dict(tensors), dict(metadata)))
