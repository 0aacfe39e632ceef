"""How tensors lie: what kernels ask about strides, of tensors that need not be there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._prims_common import suggest_memory_format


@dataclass(frozen=True)
class Layout:
    """A tensor without its memory; strides and offset are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """That of this tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, int(tensor.storage_offset()))

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """That of a new, contiguous tensor."""
        strides, step = [], 1
        for length in reversed(shape):
            strides.append(step)
            step *= max(length, 1)
        return cls(tuple(shape), tuple(reversed(strides)), dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, packed."""
        return math.prod(self.shape) * self.dtype.itemsize


def copies(*tensors: torch.Tensor | None, format: torch.memory_format = torch.contiguous_format) -> list[int]:
    """The bytes that `contiguous` takes of each tensor that is not laid out so; nothing where it is."""
    return [
        tensor.numel() * tensor.dtype.itemsize
        for tensor in tensors
        if tensor is not None and not tensor.is_contiguous(memory_format=format)
    ]


def convolution_format(one: torch.Tensor, other: torch.Tensor) -> torch.memory_format:
    """How cuDNN lays out the result of a convolution of these two: channels last where one of them is.

    Source: cudnn_conv_suggest_memory_format in aten/src/ATen/native/ConvUtils.h.
    """
    if torch.float64 in (one.dtype, other.dtype):
        return torch.contiguous_format
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(other.dim())
    if last is not None and last in (suggest_memory_format(one), suggest_memory_format(other)):
        return last
    return torch.contiguous_format
