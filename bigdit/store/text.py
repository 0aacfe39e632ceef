"""An encoded caption."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from bigdit.units import how_many

TEXT = "text"
"""What the text itself is called among the sequences of a caption."""


NAMED = 3
"""Samples that are named of those whose captions were cut."""


@dataclass(frozen=True)
class Cut:
    """Captions that a tokenizer cut: how many, the tokens of the longest, the most that are kept, the key that says so,
    None where the encoder does; and the names of the first samples."""

    tokenizer: str
    captions: int
    longest: int
    limit: int
    key: str | None
    samples: list[str] = field(default_factory=list)


def summed(cuts: Iterable[Cut]) -> list[Cut]:
    """The captions that each tokenizer cut at each limit, together."""
    found: dict[tuple[str, int, str | None], Cut] = {}
    for cut in cuts:
        place = cut.tokenizer, cut.limit, cut.key
        if (before := found.get(place)) is not None:
            names = list(dict.fromkeys((*before.samples, *cut.samples)))[:NAMED]
            longest = max(before.longest, cut.longest)
            cut = replace(before, captions=before.captions + cut.captions, longest=longest, samples=names)
        found[place] = cut
    return [found[place] for place in sorted(found, key=str)]


def cut_line(cut: Cut, captions: int) -> str:
    """What was cut, of so many `captions` in all, and how more would be kept."""
    names = f"; the first: {', '.join(cut.samples)}" if cut.samples else ""
    fix = "its encoder takes no more" if cut.key is None else f"raise {cut.key} to keep more"
    of_all = f"{how_many(captions, 'caption')} {'was' if captions == 1 else 'were'}"
    return (
        f"{cut.captions} of {of_all} cut at {cut.limit} tokens by {cut.tokenizer}, the longest has {cut.longest}; "
        f"{fix}{names}"
    )


@dataclass(frozen=True)
class Text:
    """What a caption is to a transformer: `states` [len, dim] of its tokens, in the dtype of their encoder, and the
    vector `pooled` [pooled_dim] of families that are given one.

    `seen`: how many states, from the first on, the mask shows, where it does not show all; the others are kept for a
    model that reads them all the same. `streams`: the caption as further encoders have it, by name, states alone.
    `cuts`: by which tokenizers it was cut.
    """

    states: torch.Tensor
    pooled: torch.Tensor | None = None
    seen: int | None = None
    streams: Mapping[str, Text] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()

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
        return Text(self.states.to(device, dtype), pooled, self.seen, streams, self.cuts)
