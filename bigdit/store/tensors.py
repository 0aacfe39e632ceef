"""Tensors as bytes: safetensors files that appear whole or not at all, and fingerprints of bytes, weights and sources.

Files are written from the memory where their tensors lie. Source: https://github.com/huggingface/safetensors, section
Format. Its own `save` copies every tensor, orders metadata at will and makes files that only their owner reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from bigdit.files import replacing


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, not copied: numpy has no bfloat16."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def chained_digest(buffers: Iterable[memoryview | bytes], seed: int = 0) -> int:
    """xxh3-64, as int64, of contiguous bytes one after another: each digest is the seed of the next one's."""
    digest = seed
    for buffer in buffers:
        digest = xxhash.xxh3_64_intdigest(buffer, digest)
    return digest - (1 << 64) if digest >> 63 else digest


def row_digest(index: int, latents: memoryview) -> int:
    """The digest of a sample's latents, as stored, under its source index."""
    return chained_digest((latents,), index)


def weights_digest(state: Mapping[str, torch.Tensor]) -> str:
    """Names, dtypes, shapes and values of a state dict, as hex of xxh3-128."""
    digest = xxhash.xxh3_128()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def config_digest(config: Mapping[str, Any]) -> str:
    """A config's keys and values, as hex of xxh3-128, without what only says who saved it, and how."""
    meaning = {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key not in ("transformers_version", "dtype", "torch_dtype", "architectures")
    }
    return lines_digest([json.dumps(meaning, sort_keys=True).encode()])


def lines_digest(lines: Iterable[bytes]) -> str:
    """Lines, as hex of xxh3-128."""
    digest = xxhash.xxh3_128()
    for line in lines:
        digest.update(line + b"\n")
    return digest.hexdigest()


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
