"""The encoding of the empty caption, for classifier-free guidance (Ho & Salimans, arXiv:2207.12598)."""

from __future__ import annotations

from pathlib import Path

import torch

from bigdit.features.digest import bytes_of, chained_digest
from bigdit.features.header import damaged, read_header
from bigdit.features.reader import read_column
from bigdit.features.tensors import commit_tensors

FILE = "null_text.safetensors"


def write_null_text(root: Path, text: torch.Tensor) -> None:
    """Commit the hidden states [len, dim] of the empty caption, unless they are there already."""
    if not (root / FILE).exists():
        commit_tensors(root / FILE, {"text": text, "digest": torch.tensor([_digest(text)])}, {})


def read_null_text(root: Path) -> torch.Tensor:
    """The hidden states [len, dim]. Raises UserError where the file is damaged."""
    header = read_header(root / FILE)
    text = read_column(header, "text")
    if int(read_column(header, "digest")) != _digest(text):
        raise damaged(header.path, "is damaged: its digest differs")
    return text


def _digest(text: torch.Tensor) -> int:
    return chained_digest([bytes_of(text)])
