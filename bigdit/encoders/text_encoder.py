"""What every text encoder offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from bigdit.store.text import TEXT, Text

MAX_TOKENS = "encoders.text.max_tokens"
"""The key that says how many tokens of a caption are kept."""

Keep = Callable[[Text], Text]
"""What becomes of a text as soon as its batch is encoded."""


def as_it_is(text: Text) -> Text:
    """A text that stays where it was made."""
    return text


class TextEncoder(Protocol):
    """`dim` of the states and `pooled_dim` of the vector, None where there is none; the most states of a caption.
    `streams`: of each further text of a caption, by name, the most states and their width."""

    dim: int
    pooled_dim: int | None
    max_tokens: int
    streams: Mapping[str, tuple[int, int]]

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes these texts from those of another encoder: a JSON object."""
        ...

    def modules(self) -> list[nn.Module]:
        """Those with weights."""
        ...

    def encode(self, captions: Sequence[str], kept: Keep = as_it_is) -> list[Text]:
        """Captions to their texts, each `kept`: else they are on the encoder's device, as many as there are."""
        ...

    def null(self) -> Text:
        """The text that guidance leads away from (Ho & Salimans, arXiv:2207.12598): that of no caption."""
        ...


def shapes_of(encoder: TextEncoder) -> dict[str, tuple[int, int]]:
    """The most states, and their width, of a text itself and of each stream: as FeatureStore.text_shapes."""
    return {TEXT: (encoder.max_tokens, encoder.dim), **encoder.streams}
