"""What was allocated and freed on one device, in order."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Literal, get_args

Category = Literal[
    "parameter",
    "buffer",
    "master weight",
    "gradient",
    "optimizer state",
    "EMA",
    "encoder",
    "engine buffer",
    "input",
    "saved activation",
    "recomputed activation",
    "workspace",
    "temporary",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True, slots=True)
class Block:
    """One storage, `nbytes` as torch asked for them; `label` is the module or the call that allocated it.

    `pinned`: page-locked host memory.
    """

    nbytes: int
    category: Category
    label: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """The events [start, stop) belong to this phase. A phase lasts until the next one begins."""

    phase: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective in the span of that number: `nbytes` of its largest tensor, over `group_size` processes."""

    span: int
    name: str
    nbytes: int
    group_size: int


Place = Literal["device", "host", "to device", "to host"]
"""Where an operator computes, or the way that a copy between the two goes."""


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """All calls of one operator with one dtype in one span: floating-point operations and bytes moved.

    Of a copy between host and device the bytes are those that cross.
    """

    span: int
    operator: str
    dtype: str
    calls: int
    flops: int
    nbytes: int
    place: Place = "device"


@dataclass(frozen=True)
class Timeline:
    """Blocks, and the events that allocate and free them: `i + 1` allocates block i, `-(i + 1)` frees it.

    Spans follow one another and cover all events. A block is allocated once, and freed at most once.
    """

    blocks: tuple[Block, ...]
    events: tuple[int, ...]
    spans: tuple[Span, ...]
    collectives: tuple[Collective, ...] = ()
    operators: tuple[OperatorCost, ...] = ()

    def changes(self, span: Span, granularity: int = 1) -> Iterator[tuple[Block, int]]:
        """Each event of `span` as its block and the bytes that it adds (or, negative, takes away)."""
        for event in self.events[span.start : span.stop]:
            block = self.blocks[abs(event) - 1]
            size = rounded(block.nbytes, granularity)
            yield block, size if event > 0 else -size

    def pack(self) -> str:
        """The timeline as printable text: columns, zlib, base64. `unpack` reads it."""
        labels = {label: i for i, label in enumerate(dict.fromkeys(b.label for b in self.blocks))}
        columns = {
            "labels": list(labels),
            "nbytes": [b.nbytes for b in self.blocks],
            "category": [CATEGORIES.index(b.category) for b in self.blocks],
            "label": [labels[b.label] for b in self.blocks],
            "pinned": [i for i, b in enumerate(self.blocks) if b.pinned],
            "events": self.events,
            "spans": [(s.phase, s.start, s.stop) for s in self.spans],
            "collectives": [astuple(collective) for collective in self.collectives],
            "operators": [astuple(operator) for operator in self.operators],
        }
        text = json.dumps(columns, separators=(",", ":"))
        return base64.b85encode(zlib.compress(text.encode(), 6)).decode()

    @staticmethod
    def unpack(text: str) -> Timeline:
        """The timeline that `pack` wrote. Raises ValueError for anything else."""
        try:
            columns = json.loads(zlib.decompress(base64.b85decode(text)))
            rows = zip(columns["nbytes"], columns["category"], columns["label"], strict=True)
            pinned, labels = set(columns["pinned"]), columns["labels"]
            return Timeline(
                blocks=tuple(
                    Block(size, CATEGORIES[kind], labels[at], i in pinned) for i, (size, kind, at) in enumerate(rows)
                ),
                events=tuple(columns["events"]),
                spans=tuple(Span(*row) for row in columns["spans"]),
                collectives=tuple(Collective(*row) for row in columns["collectives"]),
                operators=tuple(OperatorCost(*row) for row in columns["operators"]),
            )
        except (zlib.error, ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"not a packed timeline: {error}") from None


def rounded(nbytes: int, granularity: int) -> int:
    """`nbytes` up to the next multiple of `granularity`."""
    return -(-nbytes // granularity) * granularity
