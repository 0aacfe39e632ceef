"""A frozen linear layer that keeps its weight in int8, with a scale for each row.

Weights alone are quantised (absmax, as the weights of Dettmers et al., arXiv:2208.07339, §2): products are computed in
the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

LARGEST = 127


class Int8Linear(nn.Linear):
    """Takes the place of a frozen `linear`, and quantises its weight when it moves to a device.

    `weight` is then int8 [out, in], and `scale` [out, 1] in the dtype that the weight had.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = nn.Parameter(linear.weight.new_empty(linear.out_features, 1), requires_grad=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.weight.is_floating_point() and not self.weight.is_meta:
            weight, scale = quantised(self.weight.data)
            self.weight, self.scale = (nn.Parameter(each, requires_grad=False) for each in (weight, scale))
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(input, self.weight, self.scale, self.bias)
        return product


class _Product(torch.autograd.Function):
    """F.linear of a weight that is dequantised in the forward pass and again in the backward pass.

    Autograd would keep the dequantised weight from one to the other.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(input, dequantised(weight, scale), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient @ dequantised(*ctx.saved_tensors), None, None, None


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [rows, columns], and a scale for each row [rows, 1] in the weight's dtype."""
    largest = torch.linalg.vector_norm(weight, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    scale = (largest / LARGEST).to(weight.dtype)
    scale = scale.masked_fill_(scale == 0, 1)
    # Divided by the rounded scale, so that its rounding adds no error.
    values = (weight.float() / scale).round_().clamp_(-LARGEST, LARGEST)
    return values.to(torch.int8), scale


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[rows, columns] in the dtype of the scales: on a GPU one kernel, without a copy in between."""
    return weight * scale
