"""`scaled_dot_product_attention` as CUDA would run it: the choice of kernel and what surrounds it.

On fake CPU tensors torch makes its own choice, the one of a real CPU. For a CUDA card the choice is compiled
into CUDA builds alone, so that it is made here for dense 4-dimensional tensors in the default settings.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (select_sdp_backend) and attention.cpp
(scaled_dot_product_attention), torch 2.11 to 2.13.
Shown by the referee's rows of SD3.5-medium on an H100 (cuDNN), Flux.1-dev on an A40 (flash) and Sana on an A40
(memory-efficient), engine single.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

aten = torch.ops.aten

# Hopper and datacentre Blackwell prefer cuDNN, where it is newer than 9.15.1, as in wheels for CUDA 13.
_CUDNN_PREFERRED = ((9, 0), (10, 0), (10, 3))
_HALF = (torch.float16, torch.bfloat16)


class CudaAttention:
    """Stands for `F.scaled_dot_product_attention` on a card of this compute capability."""

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        self._capability = compute_capability

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _additive(attn_mask, query)
        saves = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        tensors = (query, key, value)
        if self._cudnn_takes(tensors) and not enable_gqa:
            return aten._scaled_dot_product_cudnn_attention(
                *tensors, attn_mask, saves, dropout_p, is_causal, False, scale=scale
            )[0]
        if self._flash_takes(tensors, attn_mask, is_causal):
            return _flash(tensors, dropout_p, is_causal, scale)
        if _efficient_takes(tensors) and not enable_gqa:
            if attn_mask is not None:
                attn_mask = _aligned_bias(attn_mask, query, key)  # in its place, as torch does: the other is freed
            return aten._scaled_dot_product_efficient_attention(
                *tensors, attn_mask, saves, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            *tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    def _cudnn_takes(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        if self._capability not in _CUDNN_PREFERRED:
            return False
        most = 256 if self._capability == (9, 0) else 128
        dims = all(t.shape[-1] % 8 == 0 and t.shape[-1] <= most for t in tensors)
        return dims and tensors[1].shape[-2] > 1 and _fits(tensors, _HALF)

    def _flash_takes(self, tensors: tuple[torch.Tensor, ...], mask: torch.Tensor | None, is_causal: bool) -> bool:
        query, key, value = tensors
        dim = query.shape[-1]
        if self._capability < (8, 0) or mask is not None or not _fits(tensors, _HALF) or dim > 256:
            return False
        if is_causal and query.shape[-2] != key.shape[-2]:
            return False
        # No backward for these head dimensions on sm_86, sm_89, sm_120 and sm_121.
        consumer = (8, 6) <= self._capability <= (8, 9) or (12, 0) <= self._capability <= (12, 1)
        trains = any(t.requires_grad for t in tensors)
        return dim == key.shape[-1] == value.shape[-1] and not (consumer and trains and 192 < dim <= 224)


def _efficient_takes(tensors: tuple[torch.Tensor, ...]) -> bool:
    query, key, value = tensors
    step = 8 if query.dtype in _HALF else 4
    aligned = query.shape[-1] == key.shape[-1] and query.shape[-1] % step == 0 and value.shape[-1] % step == 0
    return aligned and _fits(tensors, (*_HALF, torch.float32))


def _fits(tensors: tuple[torch.Tensor, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    return all(t.dim() == 4 and t.dtype in dtypes and t.stride(-1) == 1 and t.numel() > 0 for t in tensors)


def _flash(tensors: tuple[torch.Tensor, ...], dropout_p: float, is_causal: bool, scale: float | None) -> torch.Tensor:
    """Head dimensions are padded to a multiple of 8, the scale being that of the true one."""
    dim = tensors[0].shape[-1]
    query, key, value = (t if dim % 8 == 0 else F.pad(t, (0, 8 - dim % 8)) for t in tensors)
    out = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale or 1.0 / math.sqrt(dim)
    )[0]
    return out if out.shape[-1] == dim else out[..., :dim]


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """What is added to the scores for a mask of booleans."""
    masked = torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device)
    return torch.where(mask, 0.0, masked)


def _aligned_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The bias of the efficient kernel: rows that do not start at multiples of 8 elements are padded first."""
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = F.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
