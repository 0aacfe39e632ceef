"""What every text encoder offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bigdit.store.text import Text


class TextEncoder(Protocol):
    """`dim` of the states and `pooled_dim` of the vector, None where there is none; the most states of a caption."""

    dim: int
    pooled_dim: int | None
    max_tokens: int

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes these texts from those of another encoder: a JSON object."""
        ...

    def encode(self, captions: Sequence[str]) -> list[Text]:
        """Captions to their texts, on the encoder's device."""
        ...

    def null(self) -> Text:
        """The text that guidance leads away from (Ho & Salimans, arXiv:2207.12598): that of no caption."""
        ...
