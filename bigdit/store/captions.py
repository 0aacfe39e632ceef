"""The captions of a part as tables and columns: of each the text itself and what further encoders make of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from bigdit.store import fp8
from bigdit.store.digest import bytes_of, chained_digest
from bigdit.store.tensors import Pieces
from bigdit.store.text import TEXT, Text


class Caption(Protocol):
    """A caption's text, and its weight among those of its picture."""

    @property
    def text(self) -> str: ...

    @property
    def weight(self) -> float: ...


def chosen(weights: npt.NDArray[np.float32], draw: float) -> int:
    """The number of one of a picture's captions, by their weights and a number in [0, 1)."""
    sums = np.cumsum(weights, dtype=np.float64)
    return int(min(np.searchsorted(sums, draw * sums[-1], "right"), len(weights) - 1))


def column_name(kind: str, name: str) -> str:
    """The column, of `kind` text or text_scale, of a sequence; that of the text itself is called as its kind."""
    return kind if name == TEXT else f"{kind}/{name}"


def is_streamed(texts: Mapping[str, Text]) -> bool:
    """Whether they have what parts had no columns for at first: streams, and states that the mask does not show."""
    return any(text.streams or text.seen is not None for text in texts.values())


def caption_columns(
    captions: Mapping[int, tuple[Caption, ...]], texts: Mapping[str, Text], eight_bits: bool
) -> tuple[dict[str, Pieces], dict[str, Pieces], dict[int, int]]:
    """`caption` and `stream/…`; `text`, `text_scale` and `pooled`, as in part.py; the first caption of each index."""
    stored = {text: _Stored.of(found, eight_bits) for text, found in texts.items()}
    names = list(next(iter(stored.values())).sequences) if stored else [TEXT]
    chosen: list[Caption] = []
    firsts = {}
    for index, some in captions.items():
        firsts[index] = len(chosen)
        chosen += some
    places = {name: _places(stored, name) for name in names}
    table = [
        (start, length, int(np.float32(each.weight).view(np.uint32)), stored[each.text].digest, shown)
        for each in chosen
        for start, length, shown in (places[TEXT][each.text],)
    ]
    caption = _table(table, 5)
    tables = {"caption": Pieces.of(caption if is_streamed(texts) else caption[:, :4].contiguous())}
    tables |= {
        f"stream/{name}": Pieces.of(_table([places[name][each.text] for each in chosen], 3)) for name in names[1:]
    }
    columns = {}
    for name in names if stored else ():
        sequences = [found.sequences[name] for found in stored.values()]
        states, scales = zip(*((each.states, each.scale) for each in sequences), strict=True)
        columns[column_name("text", name)] = Pieces(states, tuple(states[0].shape[1:]), states[0].dtype)
        if eight_bits:
            columns[column_name("text_scale", name)] = Pieces(scales, (), torch.float32)
    vectors = [vector[None] for each in chosen if (vector := stored[each.text].pooled) is not None]
    if vectors:
        columns["pooled"] = Pieces(vectors, tuple(vectors[0].shape[1:]), torch.bfloat16)
    return tables, columns, firsts


class _Sequence(NamedTuple):
    """States and scale as they stand in the file, and how many states the mask shows."""

    states: torch.Tensor
    scale: torch.Tensor | None
    shown: int

    @classmethod
    def of(cls, text: Text, eight_bits: bool) -> _Sequence:
        if not eight_bits:
            return cls(text.states.to("cpu", torch.bfloat16).contiguous(), None, text.shown)
        states, scale = fp8.quantise(text.states.cpu())
        return cls(states.contiguous(), scale.contiguous(), text.shown)


class _Stored(NamedTuple):
    """A caption as it stands in the file: its sequences by name, the text itself first; its vector; the digest of all,
    in which the vector follows the text itself."""

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


def _places(stored: Mapping[str, _Stored], name: str) -> dict[str, tuple[int, int, int]]:
    """Of each caption where the states of a sequence begin in its column, how many there are, how many are shown."""
    sequences = [found.sequences[name] for found in stored.values()]
    starts = itertools.accumulate((len(each.states) for each in sequences), initial=0)
    rows = [(start, len(each.states), each.shown) for start, each in zip(starts, sequences, strict=False)]
    return dict(zip(stored, rows, strict=True))


def _table(rows: Sequence[tuple[int, ...]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, width)
