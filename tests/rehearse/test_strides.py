"""Strides where a dimension has one element, against torch's own."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigdit.rehearse.kernels.strides import elementwise_strides, view_strides


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Permuted tensors, some of them cut: with dimensions of one element, and of odd strides."""
    shape = draw(st.lists(st.sampled_from((1, 1, 2, 3, 4)), min_size=1, max_size=5))
    tensor = torch.empty(shape).permute(draw(st.permutations(range(len(shape)))))
    return tensor[tuple(slice(0, draw(st.integers(1, size))) for size in tensor.shape)]


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = draw(tensors())
    size, left = [], tensor.numel()
    for _ in range(draw(st.integers(0, 4))):
        size.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= size[-1]
    size.insert(draw(st.integers(0, len(size))), left)
    try:
        return tensor, tensor.view(size)
    except RuntimeError:  # no view has this shape
        return tensor, tensor.view(tensor.shape)


@settings(max_examples=500, deadline=None)
@given(views())
def test_the_strides_of_views_are_torch_s(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensor, view = pair
    assert math.prod(view.shape) == tensor.numel()
    assert view_strides(tensor.shape, tensor.stride(), view.shape) == view.stride()


@settings(max_examples=500, deadline=None)
@given(tensors())
def test_the_strides_of_results_with_numbers_are_torch_s(tensor: torch.Tensor) -> None:
    assert elementwise_strides(tensor.shape, tensor.stride()) == (tensor / 3).stride()
    assert elementwise_strides(tensor.shape, tensor.stride()) == (tensor + torch.tensor(3)).stride()
