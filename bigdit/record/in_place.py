"""Sums that torch writes into their first operand, and would not under a dispatch mode.

Two places in C++ ask whether a tensor is a subclass, and hear yes for every tensor while any
TorchDispatchMode is on, the recorder's own included; then they add out of place, one tensor more each time:

- autograd, where a tensor was used twice, adds the second gradient into the first if nothing else holds that
  (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp);
- `linear` adds the bias into the product where no addmm does both (aten/src/ATen/native/Linear.cpp).

The recorder lets such a sum take its first operand's block over, as if the mode were not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class InPlace:
    """Knows these sums when it is shown them. To be made before a recording, and entered with it."""

    def __init__(self) -> None:
        self._uses_of_the_only_holder = _uses_of_the_only_holder()
        self._in_linear = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While in here, calls of `F.linear` are known for what they are."""
        linear = F.linear
        F.linear = self._watched(linear)
        try:
            yield
        finally:
            F.linear = linear

    def is_in_place(self, func: Any, args: Any) -> bool:
        """Whether torch alone would write the sum that this call computes into its first operand."""
        if func is not torch.ops.aten.add.Tensor:
            return False
        return self._in_linear or self._accumulates(*args)

    def _watched(self, linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(linear)
        def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._in_linear = True
            try:
                return linear(*args, **kwargs)
            finally:
                self._in_linear = False

        return watched

    def _accumulates(self, first: torch.Tensor, second: Any) -> bool:
        # The engine computes without a graph; a forward recomputed within the backward pass has one.
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return False
        # A view holds its base, and thus its storage twice.
        return not first._is_view() and first._use_count() == self._uses_of_the_only_holder


@functools.cache
def _uses_of_the_only_holder() -> int:
    """How often autograd's own gradient is referenced in a dispatch mode; torch's versions differ in it."""
    with torch.enable_grad(), _Uses() as uses:
        x = torch.ones(2, requires_grad=True)
        (x.sin() + x.cos()).sum().backward()
    return uses.count


class _Uses(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.count = args[0]._use_count()
        return func(*args, **(kwargs or {}))
