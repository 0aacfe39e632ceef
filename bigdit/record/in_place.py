"""Sums that torch writes into their first operand, and would not under a dispatch mode.

Three places in C++ ask whether a tensor is a subclass. The answer is yes for every tensor while any TorchDispatchMode
is on. Then they add out of place, one tensor more each time:

- autograd, where a tensor was used twice, adds the second gradient into the first if nothing else holds that
  (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp);
- `linear` adds the bias into the product where no addmm does both (aten/src/ATen/native/Linear.cpp);
- the gradients of indexing and of topk are written into zeros (index_backward and
  value_selecting_reduction_backward in torch/csrc/autograd/FunctionsManual.cpp).

Our mode writes such a sum into its first operand, as if the mode were not there. Where the program has a mode of its
own, as selective checkpointing has, torch does add out of place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

aten = torch.ops.aten

WRITING = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
}
"""What computes the same sums in their first operands."""


@contextmanager
def replaced(owner: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While in here, that function of `owner` is what `by` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(by(original)))
    try:
        yield
    finally:
        setattr(owner, name, original)


class InPlace:
    """Knows these sums when it is shown them. To be made before a mode is entered, and entered with it."""

    def __init__(self) -> None:
        self._uses_of_the_only_holder = _uses_of_the_only_holder()
        self._in_linear = False

    def watching(self, mode: TorchDispatchMode) -> AbstractContextManager[None]:
        """While in here, calls of `F.linear` are known for what they are."""

        def watched(linear: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                self._in_linear = _get_current_dispatch_mode() is mode
                try:
                    return linear(*args, **kwargs)
                finally:
                    self._in_linear = False

            return called

        return replaced(F, "linear", watched)

    def is_in_place(self, func: Any, args: Any) -> bool:
        """Whether torch alone would write the sum that this call computes into its first operand."""
        if func is aten.add.Tensor:
            return self._in_linear or self._accumulates(*args)
        # The gradient of an indexed assignment writes into a copy, and does not accumulate.
        return func in WRITING and _in_engine() and (func is not aten.index_put.default or args[3:4] == (True,))

    def _accumulates(self, first: torch.Tensor, second: Any) -> bool:
        if not _in_engine() or not isinstance(second, torch.Tensor):
            return False
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        # A view holds its base, and thus its storage twice.
        return not first._is_view() and first._use_count() == self._uses_of_the_only_holder


def _in_engine() -> bool:
    """Autograd's engine computes without a graph; a forward recomputed within the backward pass has one."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


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
        if func is aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.count = args[0]._use_count()
        return func(*args, **(kwargs or {}))
