"""What attention takes beside its results: splits of the keys, and sums in fp32 in the backward passes.

Shown by the referee's row of Sana on an A40, engine single: the memory-efficient backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from bigdit.rehearse.scratch.launch import Card, Launch, Rule, up
from bigdit.rehearse.scratch.layout import Layout, copies
from bigdit.rehearse.scratch.reductions import total
from bigdit.units import KIB

aten = torch.ops.aten


def _flash(
    launch: Launch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    *rest: Any,
    **options: Any,
) -> None:
    """Where heads and queries keep too few multiprocessors busy, the keys are split: fp32 results of each split.

    Source: mha_fwd and set_params_splitkv in third_party/flash-attention/csrc/flash_attn/flash_api.cpp.
    """
    batch, heads, tokens, dim = query.shape
    splits = 1 if dropout_p else _splits(batch * heads * -(-tokens // 64), key.shape[2], dim, launch.card)
    rows = splits * batch * heads * tokens
    launch.results(0, 1)
    with launch.holding(*([4 * rows, 4 * rows * _rounded(dim)] if splits > 1 else [0, 0])):  # as in reductions.reduce
        launch.results()


def _splits(blocks: int, keys: int, dim: int, card: Card) -> int:
    """Into how many parts the keys go, for so many blocks of queries: the fewest that come near to the best filling
    of the card. Source: num_splits_heuristic, as above."""
    room = 2 * card.multiprocessors
    if blocks >= 0.8 * room:
        return 1
    key_blocks = -(-keys // (256 if dim <= 64 else 128 if dim <= 128 else 64))
    filled = {}
    for splits in range(1, min(128, room, key_blocks) + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = blocks * splits / room
            filled[splits] = waves / math.ceil(waves)
    return next(splits for splits, share in filled.items() if share >= 0.85 * max(filled.values()))


def _rounded(dim: int) -> int:
    return up(dim, 32) if dim <= 192 else 256


def _flash_backward(
    launch: Launch,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> None:
    """fp32: softmax_d [B, H, L'] and dq_accum [B, L', H, D'], L' in 128s, D' in 32s up to 192 and then 256.

    Source: _flash_attention_backward in aten/src/ATen/native/transformers/cuda/attention_backward.cu and mha_bwd in
    third_party/flash-attention/csrc/flash_attn/flash_api.cpp.
    """
    batch, heads, tokens, dim = query.shape
    tokens, dim = up(tokens, 128), _rounded(dim)
    with launch.holding(*copies(grad_out.transpose(1, 2), out.transpose(1, 2))):
        launch.results()
        launch.briefly(4 * batch * heads * tokens, 4 * batch * tokens * heads * dim)


def _efficient(launch: Launch, *args: Any, **options: Any) -> None:
    """The seed and offset of dropout first, where they are on the card. Source: traces of torch 2.15.0 on emulated
    cards (kernels/mended.py)."""
    launch.results(2, 3)
    launch.results()


@dataclass(frozen=True)
class _Tile:
    """A kernel of the efficient backward pass: queries and keys of a block, and the longest head that it takes.

    `ample` ones want more shared memory of a block than cards with 99 KiB have.
    """

    queries: int
    keys: int
    most: int
    ample: bool = False


_ANY = 65536

# Source: kernels/cutlassB.h in aten/src/ATen/native/transformers/cuda/mem_eff_attention, in the order of trial there,
# and sizeof(Kernel::SharedStorage) beside cudaDevAttrMaxSharedMemoryPerBlockOptin.
_SMALL = (_Tile(64, 64, 32), _Tile(64, 64, 64))
_HALF_AMPERE = (*_SMALL, _Tile(128, 128, 128, ample=True), _Tile(64, 64, 128), _Tile(128, 64, _ANY))
_HALF_ADA = (*_SMALL, _Tile(128, 64, 96), *_HALF_AMPERE[2:])  # sm_86 and sm_89 alone
_HALF_VOLTA = (*_SMALL, _Tile(128, 64, 128), _Tile(128, 64, _ANY))
_FULL_AMPERE = (
    *(*_SMALL, _Tile(128, 64, 128, ample=True), _Tile(64, 64, 128)),
    *(_Tile(128, 64, _ANY, ample=True), _Tile(64, 64, _ANY)),
)
_FULL_VOLTA = (*_SMALL, _Tile(64, 64, _ANY))
_AMPLE_BYTES = 128 * KIB


def _tile(card: Card, dtype: torch.dtype, dim: int, dropout: bool) -> _Tile:
    """The first kernel that takes heads of `dim` on this card."""
    half = dtype != torch.float32
    tiles: tuple[_Tile, ...]
    if card.compute_capability < (8, 0):
        tiles = _HALF_VOLTA if half else _FULL_VOLTA
    elif not half:
        tiles = _FULL_AMPERE
    else:
        tiles = _HALF_ADA if card.compute_capability in ((8, 6), (8, 9)) and not dropout else _HALF_AMPERE
    ample = card.limits.shared_optin_bytes > _AMPLE_BYTES
    return next(tile for tile in tiles if dim <= tile.most and (ample or not tile.ample))


def _efficient_backward(
    launch: Launch,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout_p: float,
    *rest: Any,
    **options: Any,
) -> None:
    """fp32: delta [B, H, L], and the partial sums of the gradients in tiles.

    Source: _efficient_attention_backward in aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    batch, heads, tokens, dim = query.shape
    half = query.dtype != torch.float32
    with launch.holding(*copies(grad_out.transpose(1, 2))):
        launch.results()
        rows = Layout.dense((batch, tokens, heads, dim), torch.float32)
        delta_bytes = 4 * batch * heads * tokens
        delta = launch.take([delta_bytes]) if half else _fp32_delta(launch, rows, delta_bytes)
        tile = _tile(launch.card, query.dtype, max(dim, value.shape[-1]), dropout_p > 0)
        launch.briefly(_workspace_bytes(tile, query, key, value))
        delta.clear()


def _fp32_delta(launch: Launch, rows: Layout, delta_bytes: int) -> list[torch.Tensor]:
    """The row sums of gradient times output, by torch's own operators, and turned from [B, L, H] to [B, H, L]."""
    with launch.holding(rows.nbytes):
        delta = launch.take([delta_bytes])
        total(launch, rows, (3,), torch.float32)
        _, tokens, heads, _ = rows.shape
        if tokens == 1 or heads == 1:
            return delta
        turned = launch.take([delta_bytes])
        delta.clear()
    return turned


def _workspace_bytes(tile: _Tile, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """fp32: a tile of dq with a lock of 16 bytes for each block of queries and each of the head's columns, and dk and
    dv of the splits, where registers do not hold them.

    Source: Params::workspace_size and the rule of num_splits_key, in mem_eff_attention/kernel_backward.h and
    attention_backward.cu.
    """
    batch, heads, tokens, dim = query.shape
    in_memory = query.dtype != torch.float32 and tile.most > tile.queries
    splits = -(-key.shape[2] // tile.keys)
    if batch * heads >= 256 and key.shape[2] <= 2 * tile.keys:
        splits = 1
    if in_memory:
        splits = max(min(splits, 200 // (batch * heads)), 1)
    columns = up(dim, tile.queries) + up(value.shape[-1], tile.queries) if in_memory else 0
    tiles = -(-tokens // tile.queries) * -(-dim // tile.keys)
    return batch * heads * (4 * splits * tile.keys * columns + tiles * (4 * tile.queries * tile.keys + 16))


def _cudnn(launch: Launch, *args: Any, **options: Any) -> None:
    """The state of dropout first. Source: _cudnn_attention_forward in attention.cu beside attention_backward.cu."""
    launch.results(6, 7)


def _cudnn_backward(launch: Launch, grad_out: torch.Tensor, query: torch.Tensor, *rest: Any, **options: Any) -> None:
    """dq and the row sums of gradient times output in fp32, as one block, which its graph asks for.

    What the plan itself asks for beside that is cuDNN's to say on the card. Source: run_cudnn_SDP_bprop in
    aten/src/ATen/native/cudnn/MHA.cpp and the backward node of attention in cudnn-frontend, 1.x.
    """
    batch, heads, tokens, dim = query.shape
    launch.results()
    launch.briefly(4 * batch * heads * tokens * (dim + 1))


RULES: dict[Any, Rule] = {
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
