"""Operators that the dispatcher knows as one and CUDA computes by several; copies that change more than the place.

Shown by the referee's row of Sana on an A40, engine single: the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._subclasses.fake_tensor import FakeTensor

from bigdit.rehearse.scratch.launch import Launch, Rule

aten = torch.ops.aten


def _isinf(launch: Launch, tensor: torch.Tensor) -> None:
    """The magnitudes, which are compared with infinity. Source: isinf in aten/src/ATen/native/TensorCompare.cpp."""
    if not tensor.dtype.is_floating_point:
        launch.results()
        return
    with launch.holding(tensor.numel() * tensor.dtype.itemsize):
        launch.results()


def _where(launch: Launch, condition: torch.Tensor, *chosen: Any) -> None:
    """What is chosen from, in the result's dtype. Source: where in aten/src/ATen/native/TensorCompare.cpp."""
    dtype = launch.result.dtype
    taken = [
        each.numel() * dtype.itemsize if isinstance(each, torch.Tensor) else dtype.itemsize
        for each in chosen
        if not isinstance(each, torch.Tensor) or each.dtype != dtype
    ]
    with launch.holding(*taken):
        launch.results()


def _index(launch: Launch, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
    """Indices of 32 bits in 64, and the positions where a mask is true.

    Not here: what CUB takes to count and select them, some KiB. Source: make_info in
    aten/src/ATen/native/TensorAdvancedIndexingUtils.h, nonzero_cuda_out_impl in aten/src/ATen/native/cuda/Nonzero.cu.
    """
    given = [index for index in indices if index is not None]
    narrow = [index.numel() * 8 for index in given if index.dtype == torch.int32]
    masks = [8 * index.dim() * launch.result.shape[0] for index in given if index.dtype == torch.bool]
    with launch.holding(*narrow, *masks):
        launch.results()


def _softmax_backward(launch: Launch, grad_output: torch.Tensor, output: torch.Tensor, *options: Any) -> None:
    """The gradient times the output. Source: softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu."""
    launch.results()
    launch.briefly(output.numel() * torch.result_type(grad_output, output).itemsize)


def _to_copy(launch: Launch, source: torch.Tensor, *, non_blocking: bool = False, **options: Any) -> None:
    launch.results()
    _copy_between(launch, launch.result, source, non_blocking)


def _copy(launch: Launch, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    _copy_between(launch, target, source, non_blocking)


def _copy_between(launch: Launch, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Between host and card bytes are copied as they lie: before or after, the card lays them out and converts them.

    It converts only what may arrive later; else the host does. Source: copy_kernel_cuda in
    aten/src/ATen/native/cuda/Copy.cu.
    """
    here = launch.card.device.type
    arrives, leaves = _device(target) == here, _device(source) == here
    if arrives == leaves or (source.dtype == target.dtype and _lie_alike(target, source)):
        return
    numel = target.numel()
    if arrives:
        dtype = source.dtype if non_blocking else target.dtype
        if dtype != target.dtype or not target.is_contiguous():
            launch.briefly(numel * dtype.itemsize)
        return
    converts = non_blocking and source.dtype != target.dtype
    taken = [source.numel() * target.dtype.itemsize] if converts else []
    # What is converted is packed by that, unless it is dense in another order, which stays.
    packed = source.is_contiguous() or (converts and not is_dense(source))
    if not packed or source.shape != target.shape:
        taken.append(numel * (target.dtype if non_blocking else source.dtype).itemsize)
    launch.briefly(*taken)


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one run of bytes is the other."""
    if one.shape != other.shape:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    return one.stride() == other.stride() and is_dense(one)


def _device(tensor: torch.Tensor) -> str:
    # Asking a fake tensor for its `device` is an operation, that runs through every mode.
    return tensor.fake_device.type if isinstance(tensor, FakeTensor) else tensor.device.type


def _power_of_number(launch: Launch, number: float, exponent: torch.Tensor) -> None:
    """The number as a tensor of 8 bytes. Source: TORCH_IMPL_FUNC(pow_Scalar_out) in aten/src/ATen/native/Pow.cpp."""
    launch.results()
    if number != 1 and _device(exponent) == launch.card.device.type:
        launch.briefly(8)


RULES: dict[Any, Rule] = {
    aten.pow.Scalar: _power_of_number,
    aten.isinf.default: _isinf,
    **dict.fromkeys((aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther), _where),
    aten.index.Tensor: _index,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}
