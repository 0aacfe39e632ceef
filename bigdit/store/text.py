"""Encoded captions, and their tables and columns in a part. Hidden states may be stored in 8 bits.

These are 8-bit floats (e4m3) with a scale for each token, half the bytes of bf16. e4m3 has 3 bits of mantissa, and its
largest value is 448. Source: Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433). The rounding error
is at most 2⁻⁴ of a normal value, and 2⁻¹⁰ of the scale near zero. Measured: 2.6 % of the norm of a token's state, both
for T5's states (benchmarks/README.md) and for normal numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bigdit.sources.protocol import Caption
from bigdit.store.tensors import Pieces, bytes_of, chained_digest
from bigdit.units import how_many

TEXT = "text"
"""The name of the text itself among the sequences of a caption."""


NAMED = 3
"""The most samples with cut captions that a message names."""


@dataclass(frozen=True)
class Cut:
    """How many captions a tokenizer cut at `limit` tokens. `longest`: the tokens of the longest one.

    `key`: the key of run.yaml with the limit; None if the encoder fixes it. `samples`: the names of the first samples.
    """

    tokenizer: str
    captions: int
    longest: int
    limit: int
    key: str | None
    samples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Length:
    """The tokens of one caption by a tokenizer that cuts it at `limit`. `key`: as in Cut."""

    tokenizer: str
    tokens: int
    limit: int
    key: str | None


@dataclass(frozen=True)
class Lengths:
    """How long captions are by a tokenizer that cuts them at `limit`. `counts`: pairs (tokens, captions), sorted.

    `longest`: the name of a sample with the longest caption.
    """

    tokenizer: str
    limit: int
    longest: str
    counts: list[tuple[int, int]]


def lengths_of(named: Iterable[tuple[str, Length]]) -> list[Lengths]:
    """The lengths of captions by tokenizer. `named`: the name of its sample and its length, for each caption."""
    return joined_lengths(Lengths(each.tokenizer, each.limit, name, [(each.tokens, 1)]) for name, each in named)


def joined_lengths(some: Iterable[Lengths]) -> list[Lengths]:
    """One Lengths for each tokenizer and limit."""
    counts: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    longest: dict[tuple[str, int], tuple[int, str]] = {}
    for each in some:
        place = each.tokenizer, each.limit
        counts[place].update(dict(each.counts))
        if each.counts[-1][0] > longest.get(place, (-1, ""))[0]:
            longest[place] = each.counts[-1][0], each.longest
    return [Lengths(*place, longest[place][1], sorted(counts[place].items())) for place in sorted(counts)]


def summed(cuts: Iterable[Cut]) -> list[Cut]:
    """One Cut for each tokenizer and limit."""
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
    """A message on the cut captions among all `captions`, with the fix."""
    names = f"; the first: {', '.join(cut.samples)}" if cut.samples else ""
    fix = "its encoder takes no more" if cut.key is None else f"raise {cut.key} to keep more"
    of_all = f"{how_many(captions, 'caption')} {'was' if captions == 1 else 'were'}"
    return (
        f"{cut.captions} of {of_all} cut at {cut.limit} tokens by {cut.tokenizer}, the longest has {cut.longest}; "
        f"{fix}{names}"
    )


@dataclass(frozen=True)
class Text:
    """An encoded caption: `states` [len, dim] of its tokens, in the encoder's dtype, and for some families a vector
    `pooled` [pooled_dim].

    `unmasked`: the mask shows so many states from the first on; None if it shows all. Some models read the others too.
    `streams`: the states of further encoders by name. `lengths`: its tokens by each tokenizer.
    """

    states: torch.Tensor
    pooled: torch.Tensor | None = None
    unmasked: int | None = None
    streams: Mapping[str, Text] = field(default_factory=dict)
    lengths: tuple[Length, ...] = ()

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The tokenizers that cut it."""
        cut = (each for each in self.lengths if each.tokens > each.limit)
        return tuple(Cut(each.tokenizer, 1, each.tokens, each.limit, each.key) for each in cut)

    @property
    def shown(self) -> int:
        """The number of states that the mask shows."""
        return len(self.states) if self.unmasked is None else self.unmasked

    @property
    def sequences(self) -> dict[str, Text]:
        """The text itself as TEXT, and the streams by name, in their order on disk."""
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
        return Text(self.states.to(device, dtype), pooled, self.unmasked, streams, self.lengths)


DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(DTYPE).max  # 448


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [len, dim] as e4m3 [len, dim] and fp32 scales [len]. A token's largest value becomes e4m3's largest."""
    wide = states.float()
    scale = wide.abs().amax(dim=1) / _LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a token of zeros
    return (wide / scale[:, None]).clamp(-_LARGEST, _LARGEST).to(DTYPE), scale


def dequantise(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The states [len, dim] in `dtype` of e4m3 values [len, dim] and fp32 scales [len]."""
    return (values.float() * scale[:, None]).to(dtype)


def chosen(weights: npt.NDArray[np.float32], draw: float) -> int:
    """The number of a caption, chosen by weight with the random number `draw` in [0, 1)."""
    sums = np.cumsum(weights, dtype=np.float64)
    return int(min(np.searchsorted(sums, draw * sums[-1], "right"), len(weights) - 1))


def column_name(kind: str, name: str) -> str:
    """The name of the column `kind` (text, text_scale, seen) of a sequence."""
    return kind if name == TEXT else f"{kind}/{name}"


TextKey = str | tuple[int, str]
"""A caption; if texts depend on images, the index of an image and its caption."""


def text_key(texts: Mapping[TextKey, Text], index: int, caption: str) -> TextKey:
    """The key of a caption of an image."""
    return (index, caption) if (index, caption) in texts else caption


def caption_columns(
    captions: Mapping[int, tuple[Caption, ...]], texts: Mapping[TextKey, Text], eight_bits: bool
) -> tuple[dict[str, Pieces], dict[str, Pieces], dict[int, int]]:
    """Tables `caption` and `stream/…`; columns `text…`, `text_scale…` and `pooled`; the first caption of each index."""
    stored = {text: _Stored.of(found, eight_bits) for text, found in texts.items()}
    names = list(next(iter(stored.values())).sequences) if stored else [TEXT]
    chosen: list[tuple[Caption, TextKey]] = []
    firsts = {}
    for index, some in captions.items():
        firsts[index] = len(chosen)
        chosen += [(each, text_key(texts, index, each.text)) for each in some]
    places = {name: _places(stored, name) for name in names}
    table = [
        (start, length, int(np.float32(each.weight).view(np.uint32)), stored[key].digest, shown)
        for each, key in chosen
        for start, length, shown in (places[TEXT][key],)
    ]
    tables = {"caption": Pieces.of(_table(table, 5))}
    tables |= {f"stream/{name}": Pieces.of(_table([places[name][key] for _, key in chosen], 3)) for name in names[1:]}
    columns = {}
    for name in names if stored else ():
        sequences = [found.sequences[name] for found in stored.values()]
        states, scales = zip(*((each.states, each.scale) for each in sequences), strict=True)
        columns[column_name("text", name)] = Pieces(states, tuple(states[0].shape[1:]), states[0].dtype)
        if eight_bits:
            columns[column_name("text_scale", name)] = Pieces(scales, (), torch.float32)
    vectors = [vector[None] for _, key in chosen if (vector := stored[key].pooled) is not None]
    if vectors:
        columns["pooled"] = Pieces(vectors, tuple(vectors[0].shape[1:]), torch.bfloat16)
    return tables, columns, firsts


class _Sequence(NamedTuple):
    """States and scale as stored, and the number of states that the mask shows."""

    states: torch.Tensor
    scale: torch.Tensor | None
    shown: int

    @classmethod
    def of(cls, text: Text, eight_bits: bool) -> _Sequence:
        if not eight_bits:
            return cls(text.states.to("cpu", torch.bfloat16).contiguous(), None, text.shown)
        states, scale = quantise(text.states.cpu())
        return cls(states.contiguous(), scale.contiguous(), text.shown)


class _Stored(NamedTuple):
    """A caption as stored: its sequences by name, the text itself first; its vector; the digest of all.

    In the digest, the vector comes right after the text itself.
    """

    sequences: dict[str, _Sequence]
    pooled: torch.Tensor | None
    digest: int

    @classmethod
    def of(cls, text: Text, eight_bits: bool) -> _Stored:
        sequences = {name: _Sequence.of(each, eight_bits) for name, each in text.sequences.items()}
        pooled = None if text.pooled is None else text.pooled.to("cpu", torch.bfloat16).contiguous()
        first, *others = sequences.values()
        parts = [first.states, first.scale, pooled, *(part for each in others for part in (each.states, each.scale))]
        return cls(sequences, pooled, chained_digest(bytes_of(part) for part in parts if part is not None))


def _places(stored: Mapping[TextKey, _Stored], name: str) -> dict[TextKey, tuple[int, int, int]]:
    """By caption: the first state of a sequence in its column, the number of states, and the number that is shown."""
    sequences = [found.sequences[name] for found in stored.values()]
    starts = itertools.accumulate((len(each.states) for each in sequences), initial=0)
    rows = [(start, len(each.states), each.shown) for start, each in zip(starts, sequences, strict=False)]
    return dict(zip(stored, rows, strict=True))


def _table(rows: Sequence[tuple[int, ...]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, width)
