"""Normalisations: contiguous copies of what they read, and partial sums of the weights' gradients.

Shown by the referee's row of Sana on an A40, engine single: layer norm, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bigdit.rehearse.scratch.launch import Launch, Rule
from bigdit.rehearse.scratch.layout import Layout, copies
from bigdit.rehearse.scratch.reductions import total

aten = torch.ops.aten


def _forward(launch: Launch, input: torch.Tensor, *options: Any, **named: Any) -> None:
    with launch.holding(*copies(input)):
        launch.results()


def _layer_norm_backward(
    launch: Launch,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> None:
    _backward(launch, grad_output, input, math.prod(normalized_shape))


def _rms_norm_backward(
    launch: Launch, grad_output: torch.Tensor, input: torch.Tensor, normalized_shape: Sequence[int], *options: Any
) -> None:
    _backward(launch, grad_output, input, math.prod(normalized_shape))


def _backward(launch: Launch, grad_output: torch.Tensor, input: torch.Tensor, width: int) -> None:
    """Results, and of many short rows the weights' gradients by blocks of rows, that are then summed.

    Source: layer_norm_backward_cuda and LaunchGammaBetaBackwardCUDAKernel in
    aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """
    rows = input.numel() // width
    weights = [number for number in range(1, len(launch.result)) if launch.result[number] is not None]
    many = rows > 64 * 1024 and width // 32 < launch.card.multiprocessors // 2
    with launch.holding(*copies(input)):
        launch.results(0)
        if not many:
            launch.results()
            launch.briefly(*copies(grad_output))
            return
        blocks = min(32 * 1024 // -(-width // 32), -(-rows // 32))
        partial = Layout.dense((blocks, width), input.dtype)
        first = launch.take([width * input.dtype.itemsize] * len(weights))
        with launch.holding(*copies(grad_output), *[partial.nbytes] * len(weights)):
            for number in weights:
                launch.results(number)
                total(launch, partial, (0,), input.dtype)
                first.pop(0)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.native_layer_norm.default, aten._fused_rms_norm.default), _forward),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
}
