"""Attention to texts of several lengths without a mask: one sample after another, each with its own tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch.nn import functional as F


class Unpadded:
    """A class's own attention, `whole`, called for one sample after another, each with so many `tokens` of its text."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.tokens: Sequence[int] = ()

    @classmethod
    def of(cls, attentions: Sequence[Any]) -> Self:
        """That of all of them, which they are given before the first pass."""
        found = attentions[0].processor
        if isinstance(found, cls):
            return found
        made = cls(found)
        for attention in attentions:
            attention.set_processor(made)
        return made


def padded(rows: Iterable[torch.Tensor], length: int) -> torch.Tensor:
    """Rows [1, T, D] as one tensor of `length` tokens, with zeros behind each."""
    return torch.cat([F.pad(row, (0, 0, 0, length - row.shape[1])) for row in rows])
