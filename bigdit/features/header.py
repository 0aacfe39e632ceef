"""The header of a safetensors file: where each tensor lies, read and checked without reading any data.

Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigdit.errors import UserError
from bigdit.features.part import Shape, Skipped
from bigdit.features.schema import EXTRACT

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}


@dataclass(frozen=True)
class Column:
    """A tensor in a file: its data begins at byte `offset`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """Columns and metadata of the file at `path`."""

    path: Path
    columns: dict[str, Column]
    metadata: dict[str, str]

    def shapes(self) -> dict[Shape, int]:
        """Shapes C×H×W of a part's latents, and the samples of each."""
        columns = ((column.shape, name) for name, column in self.columns.items() if name.startswith("latents/"))
        return {(shape[1], shape[2], shape[3]): shape[0] for shape, _ in columns}

    def skipped(self) -> list[Skipped]:
        """What the part's range left out."""
        return [Skipped(*entry) for entry in json.loads(self.metadata["skipped"])]


def damaged(path: Path, what: str) -> UserError:
    """The error of a file of the store that must be made again."""
    return UserError(f"data.features: {path} {what}; delete it, then {EXTRACT} makes it again")


def read_header(path: Path) -> Header:
    """Read the header alone, and hold its sizes against the file's. Raises UserError where they disagree."""
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise damaged(path, f"is truncated: at least {8 + length} bytes were expected, {size} were found")
        text = file.read(length)
    try:
        entries: dict[str, Any] = json.loads(text)
        metadata = entries.pop("__metadata__", {})
        columns = {name: _column(entry, 8 + length) for name, entry in entries.items()}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged(path, "has a damaged header") from None
    if size != end:
        what = "truncated" if size < end else "too long"
        raise damaged(path, f"is {what}: {end} bytes were expected, {size} were found")
    return Header(path, columns, metadata)


def _column(entry: dict[str, Any], data_start: int) -> Column:
    begin, end = entry["data_offsets"]
    column = Column(_DTYPES[entry["dtype"]], tuple(entry["shape"]), data_start + begin)
    if math.prod(column.shape) * column.dtype.itemsize != end - begin:
        raise ValueError("shape and bytes disagree")
    return column
