"""Memory that CUDA kernels take from torch's allocator inside one operation, where no dispatch mode sees it.

Each rule is the host code of one kernel, from its source: what it takes beside its results, and in which order. Not in
them: cuDNN's convolutions and attention, whose workspace follows from an algorithm that cuDNN picks on the card (0 for
most, and up to what the card has free); but of patches, where a card was seen to take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from bigdit.rehearse.device import FAKE_GPU
from bigdit.rehearse.scratch import attention, convolutions, elementwise, lists, losses, normalisation, reductions
from bigdit.rehearse.scratch.blas import Workspaces, cublas_workspace_bytes
from bigdit.rehearse.scratch.launch import Card, Launch, Rule
from bigdit.rehearse.scratch.quantised import QuantisedProducts

__all__ = ["Card", "Scratch", "cublas_workspace_bytes", "scratch_of"]


class Scratch:
    """The rules of one card; what they leave for good is one process's."""

    def __init__(self, card: Card) -> None:
        self._card = card
        workspaces = Workspaces()
        self._rules: dict[Any, Rule | None] = {**workspaces.rules()}
        for kind in (attention, convolutions, elementwise, lists, losses, normalisation, reductions):
            self._rules |= kind.RULES
        self._by_name = QuantisedProducts(workspaces).by_name()

    def __call__(self, func: Any) -> Callable[..., None] | None:
        """The rule of this operator, as the recorder calls it; None where it takes its results alone."""
        try:
            rule = self._rules[func]
        except KeyError:
            rule = self._rules[func] = self._by_name.get(str(func))
        if rule is None:
            return None

        def run(
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
            result: Any,
            see_results: Callable[[Any], None],
            see_workspace: Callable[[torch.Tensor], None],
        ) -> None:
            if _is_any_on_the_card((result, args)):  # what is offloaded is computed on the host
                rule(Launch(self._card, result, see_results, see_workspace), *args, **kwargs)

        return run


def _is_any_on_the_card(value: Any) -> bool:
    if isinstance(value, FakeTensor):
        return value.fake_device.type == FAKE_GPU
    return isinstance(value, list | tuple) and any(map(_is_any_on_the_card, value))


def scratch_of(device: torch.device) -> Scratch | None:
    """The rules of the fake GPU; of a real device none: what it takes is not seen, or counted by its allocator."""
    if device.type != FAKE_GPU:
        return None
    module = torch.get_device_module(FAKE_GPU)
    return Scratch(Card(device, module.compute_capability, module.multiprocessors))
