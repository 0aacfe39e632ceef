"""cuDNN's convolutions: contiguous copies of what they read, and the bias' gradient.

cuDNN's own workspace follows from an algorithm that it picks on the card, and is not here; but for patches, where it is
known.
Source: aten/src/ATen/native/Convolution.cpp (convolution_backward) and cudnn/ConvShared.cpp.
Shown by the referee's row of Sana on an A40, engine single.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from bigdit.rehearse.scratch.launch import Launch, Rule, up
from bigdit.rehearse.scratch.layout import Layout, convolution_format, copies
from bigdit.rehearse.scratch.reductions import total

aten = torch.ops.aten


def _forward(
    launch: Launch,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    *options: Any,
) -> None:
    format = convolution_format(input, weight)
    with launch.holding(*copies(input, format=format)):
        launch.results()
        with launch.holding(*copies(weight, format=format)):
            if format == torch.contiguous_format and launch.card.compute_capability >= (8, 0):
                launch.briefly(*_patches_workspace(input, weight, launch.result, stride))


def _patches_workspace(
    input: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, stride: Sequence[int]
) -> list[int]:
    """What cuDNN works in where it cuts pictures into patches, in 16 bits: all three with channels last, in eights.

    The rule, and what it was measured by, is that of emulated cards: patches_workspace in emulator/c/dnn.c.
    """
    patches = weight.dim() == 4 and weight.shape[2:].numel() > 1 and tuple(weight.shape[2:]) == tuple(stride)
    if not patches or input.dtype.itemsize != 2 or weight.shape[1] != input.shape[1]:
        return []
    elements = sum(one.numel() // one.shape[1] * up(one.shape[1], 8) for one in (input, weight, result))
    return [2 * elements + 147]


def _backward(
    launch: Launch,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> None:
    wants_input, wants_weight, wants_bias = output_mask
    format = convolution_format(input, weight)
    with launch.holding(*(copies(input, format=format) if wants_weight else [])):
        if wants_weight:
            input = input.contiguous(memory_format=format)
        if _is_torchs_own(input, weight, groups, format):
            launch.results(1, 0)
        else:
            _cudnn_backward(launch, grad_output, input, weight, wants_input, wants_weight)
    if wants_bias:
        launch.results(2)
        total(launch, Layout.of(grad_output), (0, *range(2, grad_output.dim())), grad_output.dtype)


def _is_torchs_own(input: torch.Tensor, weight: torch.Tensor, groups: int, format: torch.memory_format) -> bool:
    """Depthwise convolutions in 2 dimensions that are not channels last are torch's, which begin with the weight.

    Source: use_cudnn_depthwise and is_depthwise in Convolution.cpp; fp16, of which cuDNN takes some, is left out.
    """
    depthwise = groups > 1 and groups == input.shape[1] and weight.shape[0] % groups == 0
    return depthwise and input.dim() == 4 and format == torch.contiguous_format and input.dtype != torch.float16


def _cudnn_backward(
    launch: Launch,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    wants_input: bool,
    wants_weight: bool,
) -> None:
    """The input's gradient, then the weight's; the output's is first laid out as the input is."""
    format = suggest_memory_format(input)
    turned = suggest_memory_format(grad_output) != format
    with launch.holding(*([grad_output.numel() * grad_output.dtype.itemsize] if turned else [])):
        if turned:
            grad_output = torch.empty_like(grad_output, memory_format=format)
        if wants_input:
            launch.results(0)
            launch.briefly(*copies(weight, grad_output, format=convolution_format(grad_output, weight)))
        if wants_weight:
            with launch.holding(*copies(grad_output, input, format=convolution_format(input, grad_output))):
                launch.results(1)


RULES: dict[Any, Rule] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
