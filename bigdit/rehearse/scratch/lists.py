"""FSDP2's operators on lists of tensors, each one kernel that is handed a table of addresses and sizes.

The table is packed on the host and copied to the card, in 64-bit integers; among them is a number for each block of
threads. Source: aten/src/ATen/native/cuda/TensorShape.cu. Shown by the referee's rows of engine fsdp2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as _  # noqa: F401  defines the operators

from bigdit.rehearse.scratch.launch import Card, Launch, Rule, up

_THREADS = 128
_TILE_BYTES = 16 * _THREADS
"""What a block of threads copies at once."""


def split_table_bytes(rows: int, split_bytes: Sequence[int], card: Card) -> int:
    """The table that splits a tensor of `rows` into lists of so many bytes of each row.

    Three numbers a split, those of its blocks added up, and a number a block.
    """
    most = 2 * card.multiprocessors * card.limits.threads // _THREADS
    steps = -(-rows * sum(-(-nbytes // _TILE_BYTES) for nbytes in split_bytes) // most)
    rows_a_block = min(math.ceil(math.sqrt(steps)), rows)
    steps_a_row = -(-steps // rows_a_block)
    blocks = sum(-(-nbytes // (_TILE_BYTES * steps_a_row)) for nbytes in split_bytes)
    return 8 * (3 * len(split_bytes) + blocks + len(split_bytes) + 1)


def cat_table_bytes(chunk_bytes: Sequence[int]) -> int:
    """The table that packs tensors, each with so many bytes in a chunk: six numbers a tensor, and a number a block."""
    blocks = sum(-(-nbytes // _TILE_BYTES) for nbytes in chunk_bytes)
    return 8 * (6 * len(chunk_bytes) + 2 + blocks)


def _split_with_sizes_copy(
    launch: Launch, whole: torch.Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[torch.Tensor]
) -> None:
    one_kernel = is_dense(whole) and all(is_dense(part) and part.dtype == whole.dtype for part in out)
    if one_kernel:  # else each part is copied for itself
        step = whole.stride(dim) * whole.dtype.itemsize
        rows = math.prod(whole.shape[:dim])
        launch.briefly(split_table_bytes(rows, [size * step for size in sizes], launch.card))


def _chunk_cat(
    launch: Launch, tensors: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
) -> None:
    dtype = tensors[0].dtype
    widens = dtype == torch.bfloat16 and out.dtype == torch.float32
    if all(map(is_dense, tensors)) and (dtype == out.dtype or widens):
        elements = (-(-t.shape[dim] // num_chunks) * math.prod(t.shape[dim + 1 :]) for t in tensors)
        launch.briefly(cat_table_bytes([each * out.dtype.itemsize for each in elements]))
        return
    # Each tensor that does not come out even is padded for itself. Source: _pad_chunk in
    # aten/src/ATen/native/TensorShape.cpp.
    uneven = (t for t in tensors if t.shape[dim] % num_chunks)
    launch.briefly(*(up(t.shape[dim], num_chunks) * (t.numel() // t.shape[dim]) * dtype.itemsize for t in uneven))


def _chunk_cat_mixed_dtype(
    launch: Launch, tensors: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
) -> None:
    """As `_chunk_cat` for those of each dtype. Source: torch/csrc/distributed/fsdp/ChunkCat.cu, torch 2.15."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        _chunk_cat(launch, [tensor for tensor in tensors if tensor.dtype == dtype], dim, num_chunks, out=out)


RULES: dict[Any, Rule] = {
    torch.ops.fsdp.split_with_sizes_copy.default: _split_with_sizes_copy,
    torch.ops.fsdp.chunk_cat.default: _chunk_cat,
}
if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):  # which torch 2.15 calls in its place
    RULES[torch.ops.fsdp.chunk_cat_mixed_dtype.default] = _chunk_cat_mixed_dtype
