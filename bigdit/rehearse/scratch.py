"""Memory that CUDA kernels take from torch's allocator inside one operation, where no dispatch mode sees it.

A small table of rules, each from the kernel's source. Not in it: cuDNN's convolutions, whose workspace follows
from an algorithm that cuDNN picks on the card (0 for most, and up to what the card has free); reductions and
normalisations, which take a few KiB a streaming multiprocessor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bigdit.rehearse.device import FAKE_GPU
from bigdit.units import KIB, MIB

aten = torch.ops.aten

_MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


class Scratch:
    """What an operation holds while it runs, and what it leaves for good, on a card of this compute capability."""

    def __init__(self, device: torch.device, compute_capability: tuple[int, int]) -> None:
        self._device = device
        self._workspace_bytes = cublas_workspace_bytes(compute_capability)
        self._workspaces: dict[tuple[bool, int], torch.Tensor] = {}

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that `func` needs beside its results: to be held until it is done."""
        if func in _MATMULS:
            return [self._cublas_workspace()]
        if str(func) == _GEMM_4BIT:
            return [self._cublas_workspace(), *self._held(_gemm_4bit(*args))]
        if str(func) == _INT8_SCALED_MM:
            return self._held(_int8_scaled_mm(*args, **kwargs))
        rule = _RULES.get(func)
        return [] if rule is None else self._held(rule(*args))

    def _held(self, sizes: Iterable[int]) -> list[torch.Tensor]:
        return [torch.empty(n, dtype=torch.uint8, device=self._device) for n in sizes]

    def _cublas_workspace(self) -> torch.Tensor:
        # One for each handle and stream, and the thread of the backward pass has a handle of its own.
        # Source: getCurrentCUDABlasHandle in aten/src/ATen/cuda/CublasHandlePool.cpp; cuBLASLt shares it.
        in_backward = torch._C._current_graph_task_id() != -1
        key = (in_backward, torch.get_device_module(self._device.type).current_stream().stream_id)
        if key not in self._workspaces:
            self._workspaces[key] = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        return self._workspaces[key]


def scratch_of(device: torch.device) -> Scratch | None:
    """The rules of the fake GPU; of a real device none: what it takes is not seen, or counted by its allocator."""
    if device.type != FAKE_GPU:
        return None
    return Scratch(device, torch.get_device_module(FAKE_GPU).compute_capability)


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """The workspace of one cuBLAS handle on one stream.

    Source: parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on sm_90, sm_100 and
    sm_120, and 2 × 4096 KiB + 8 × 16 KiB elsewhere, torch 2.11 to 2.13.
    """
    return 32 * MIB if compute_capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * KIB


def _flash_backward(grad_out: torch.Tensor, query: torch.Tensor, *rest: Any) -> list[int]:
    """fp32: softmax_d [B, H, L'] and dq_accum [B, L', H, D'], L' in 128s, D' in 32s up to 192 and then 256.

    Source: mha_bwd in third_party/flash-attention/csrc/flash_attn/flash_api.cpp. cuDNN's graph says nothing of
    its workspace; the same two sums have to be somewhere, and are taken to be these.
    """
    batch, heads, tokens, dim = query.shape
    tokens = _up(tokens, 128)
    dim = _up(dim, 32) if dim <= 192 else 256
    return [4 * batch * heads * tokens, 4 * batch * tokens * heads * dim]


def _efficient_backward(grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> list[int]:
    """fp32: delta [B, H, L], and the partial sums of dq in tiles, each with a lock of 16 bytes.

    Tiles are 64 × 64 up to a head dimension of 64, and 128 × 128 above, as on cards with 164 KiB of shared
    memory a multiprocessor; dk and dv stay in registers up to 128.

    Source: _efficient_attention_backward in aten/src/ATen/native/transformers/cuda/attention_backward.cu and
    workspace_size in mem_eff_attention/kernel_backward.h.
    """
    batch, heads, tokens, dim = query.shape
    side = 64 if dim <= 64 else 128
    tiles = -(-tokens // side) * -(-dim // side)
    return [4 * batch * heads * tokens, batch * heads * tiles * (side * side * 4 + 16)]


def _gemm_4bit(input: torch.Tensor, packed: torch.Tensor, shape: Sequence[int], *rest: Any) -> list[int]:
    """The weight in the input's dtype, for torch's own product.

    So it is above 1536 rows (samples × tokens); below, a table by card and shape may choose a kernel that takes
    nothing, and this is then the most that it could be. Source: gemm_4bit in bitsandbytes/backends/cuda/ops.py.
    """
    return [math.prod(shape) * input.element_size()]


def _int8_scaled_mm(
    rows: torch.Tensor, columns: torch.Tensor, *rest: Any, dtype: torch.dtype = torch.float16, **options: Any
) -> list[int]:
    """The product in int32, and scaled in fp16 where that is not the result.

    Source: int8_scaled_mm and int8_mm_dequant in bitsandbytes/backends/default/ops.py and backends/cuda/ops.py.
    """
    count = rows.numel() // rows.shape[-1] * columns.shape[0]
    return [4 * count] if dtype == torch.float16 else [4 * count, 2 * count]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# By name: these operators exist once bitsandbytes is imported.
_GEMM_4BIT = "bitsandbytes.gemm_4bit.default"
_INT8_SCALED_MM = "bitsandbytes.int8_scaled_mm.default"

_RULES: dict[Any, Callable[..., list[int]]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
