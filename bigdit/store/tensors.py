"""Tensors as bytes: safetensors files that are written whole or not at all, and digests of bytes, weights and configs.

Files are written from the memory of the tensors. Source: https://github.com/huggingface/safetensors, section Format.
The library's `save` copies every tensor, orders metadata at random, and makes files that only their owner can read.
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
    """The memory of a contiguous CPU tensor as bytes, without a copy. numpy has no bfloat16."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def chained_digest(buffers: Iterable[memoryview | bytes], seed: int = 0) -> int:
    """xxh3-64, as int64, of several buffers. Each digest is the seed of the next."""
    digest = seed
    for buffer in buffers:
        digest = xxhash.xxh3_64_intdigest(buffer, digest)
    return digest - (1 << 64) if digest >> 63 else digest


def row_digest(index: int, latents: memoryview) -> int:
    """The digest of a sample's stored latents, seeded with its source index."""
    return chained_digest((latents,), index)


def weights_digest(state: Mapping[str, torch.Tensor]) -> str:
    """xxh3-128, in hex, of names, dtypes, shapes and values of a state dict."""
    digest = xxhash.xxh3_128()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def config_digest(config: Mapping[str, Any]) -> str:
    """xxh3-128, in hex, of a config's keys and values, without the keys on how it was saved."""
    on_saving = ("transformers_version", "dtype", "torch_dtype", "architectures")
    rest = {key: value for key, value in config.items() if not key.startswith("_") and key not in on_saving}
    return lines_digest([json.dumps(rest, sort_keys=True).encode()])


def lines_digest(lines: Iterable[bytes]) -> str:
    """xxh3-128, in hex, of lines."""
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
    """A tensor of a file, in contiguous pieces along its first dimension. `width`: the other dimensions."""

    pieces: Sequence[torch.Tensor]
    width: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pieces:
        """A tensor in one piece."""
        return cls((tensor,), tuple(tensor.shape[1:]), tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return (sum(len(piece) for piece in self.pieces), *self.width)

    def buffers(self) -> list[memoryview]:
        """The bytes of the pieces."""
        return [bytes_of(piece) for piece in self.pieces]


def header_bytes(tensors: Mapping[str, Pieces], metadata: Mapping[str, str]) -> bytes:
    """The header of a file with these tensors in this order."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def commit(path: Path, header: bytes, tensors: Mapping[str, Pieces], workspace: Path | None = None) -> None:
    """Write `header` and the tensors to `path` as a whole, through `workspace` as in files.replacing.

    Raises UserError if the disk is full or cannot be written.
    """
    with replacing(path, workspace) as temporary, open(temporary, "wb", buffering=0) as file:
        for buffer in (memoryview(header), *(buffer for tensor in tensors.values() for buffer in tensor.buffers())):
            while buffer:  # one call writes at most 2 GiB
                buffer = buffer[file.write(buffer) :]


def commit_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], workspace: Path | None = None
) -> None:
    """Write tensors to `path`. The same tensors give the same bytes. Raises UserError as `commit`."""
    pieces = {name: Pieces.of(tensor.contiguous()) for name, tensor in tensors.items()}
    commit(path, header_bytes(pieces, metadata), pieces, workspace)
