"""One operation on one card, told in the order of its kernel's host code: what it takes, and when its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bigdit.catalog.capability import Capability, capability


@dataclass(frozen=True)
class Card:
    """What of a card decides how kernels are launched."""

    device: torch.device
    compute_capability: tuple[int, int]
    multiprocessors: int

    @property
    def limits(self) -> Capability:
        """What one of its multiprocessors holds."""
        return capability(self.compute_capability)


@dataclass(frozen=True)
class Launch:
    """One call of an operator. A rule calls `results` and enters `holding` in the order in which the kernel does."""

    card: Card
    result: Any
    see_results: Callable[[Any], None]
    see_workspace: Callable[[torch.Tensor], None]

    def results(self, *which: int) -> None:
        """All results are allocated now, or those of these numbers."""
        self.see_results([self.result[number] for number in which] if which else self.result)

    @contextmanager
    def holding(self, *sizes: int) -> Iterator[None]:
        """Blocks of so many bytes are taken now, in this order, and given back at the end."""
        held = self.take(sizes)
        yield
        while held:
            held.pop()

    def briefly(self, *sizes: int) -> None:
        """Blocks of so many bytes are taken, and given back at once."""
        with self.holding(*sizes):
            pass

    def take(self, sizes: Iterable[int]) -> list[torch.Tensor]:
        """Blocks of so many bytes, for as long as these tensors live."""
        taken = []
        for nbytes in sizes:
            taken.append(torch.empty(nbytes, dtype=torch.uint8, device=self.card.device))
            self.see_workspace(taken[-1])
        return taken


Rule = Callable[..., None]
"""Called with a Launch and the operator's own arguments."""


def up(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // multiple) * multiple
