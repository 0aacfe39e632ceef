"""Which elements of the trained parameters a process's masters hold, alike for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """A run of a parameter's elements, as they follow each other in memory, within a master of this process.

    Elements `offset` to `offset + length` of the parameter `name`, which has `shape` as a whole, are elements `start`
    to `start + length` of master number `master`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    master: int
    start: int
    length: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def whole(named: Iterable[tuple[str, torch.Tensor]]) -> list[Shard]:
    """Parameters that are each a master of their own, in the masters' order."""
    return [Shard(name, tuple(param.shape), 0, i, 0, param.numel()) for i, (name, param) in enumerate(named)]
