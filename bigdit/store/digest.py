"""Fingerprints: of stored bytes, to find damage on the disk, and of weights and sources, to tell them apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash


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
