"""An encoded caption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

TEXT = "text"
"""What the text itself is called among the sequences of a caption."""


@dataclass(frozen=True)
class Text:
    """What a caption is to a transformer: `states` [len, dim] of its tokens, in the dtype of their encoder, and the
    vector `pooled` [pooled_dim] of families that are given one.

    `seen`: how many states, from the first on, the mask shows, where it does not show all; the others are kept for a
    model that reads them all the same. `streams`: the caption as further encoders have it, by name, states alone.
    """

    states: torch.Tensor
    pooled: torch.Tensor | None = None
    seen: int | None = None
    streams: Mapping[str, Text] = field(default_factory=dict)

    @property
    def shown(self) -> int:
        """How many states the mask shows."""
        return len(self.states) if self.seen is None else self.seen

    @property
    def sequences(self) -> dict[str, Text]:
        """The text itself as TEXT, and the streams by name, in their order on the disk."""
        return {TEXT: self} | dict(sorted(self.streams.items()))

    @property
    def nbytes(self) -> int:
        """Bytes of all its values."""
        states = sum(each.states.nbytes for each in self.sequences.values())
        return int(states + (0 if self.pooled is None else self.pooled.nbytes))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Text:
        """The text on `device` in `dtype`."""
        pooled = None if self.pooled is None else self.pooled.to(device, dtype)
        streams = {name: each.to(device, dtype) for name, each in self.streams.items()}
        return Text(self.states.to(device, dtype), pooled, self.seen, streams)
