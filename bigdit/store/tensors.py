"""Safetensors files that appear whole or not at all, written from the memory where their tensors lie.

Source: https://github.com/huggingface/safetensors, section Format. Its own `save` copies every tensor, orders metadata
at will and makes files that only their owner reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bigdit.files import replacing
from bigdit.store.digest import bytes_of

DTYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Pieces:
    """A tensor of a file, as contiguous pieces along its first dimension; `width`: the others."""

    pieces: Sequence[torch.Tensor]
    width: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pieces:
        """A tensor in one piece."""
        return cls((tensor,), tuple(tensor.shape[1:]), tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return (sum(len(piece) for piece in self.pieces), *self.width)

    def buffers(self) -> list[memoryview]:
        """Its bytes."""
        return [bytes_of(piece) for piece in self.pieces]


def header_bytes(tensors: Mapping[str, Pieces], metadata: Mapping[str, str]) -> bytes:
    """What a file of these tensors, in this order, begins with."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def commit(path: Path, header: bytes, tensors: Mapping[str, Pieces], scratch: Path | None = None) -> None:
    """Write `header` and the tensors to `path` as a whole, by way of `scratch` as in files.replacing.

    Raises UserError where the disk is full or cannot be written.
    """
    with replacing(path, scratch) as temporary, open(temporary, "wb", buffering=0) as file:
        for buffer in (memoryview(header), *(buffer for tensor in tensors.values() for buffer in tensor.buffers())):
            while buffer:  # a write of more than 2 GiB is cut
                buffer = buffer[file.write(buffer) :]


def commit_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], scratch: Path | None = None
) -> None:
    """Write whole tensors to `path`; the same tensors give the same bytes. Raises UserError as `commit` does."""
    pieces = {name: Pieces.of(tensor.contiguous()) for name, tensor in tensors.items()}
    commit(path, header_bytes(pieces, metadata), pieces, scratch)
