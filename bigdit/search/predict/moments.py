"""What is live at every moment of a rehearsed step, and how that grows with the micro-batch and with each block.

Between two rehearsals of like blocks every moment of the shorter one is found again in the longer one: all up to the
first block's end from the start, all from the last block on from the end. What is live at such a moment is affine in
the micro-batch size, since every tensor is, and in the number of blocks, since each adds the same; its maximum over
moments is not. So moments are continued, and the peak is read off them. What kernels take within an operation does not
grow so: a reduction's buffer grows until its blocks fill the card, and is gone where each output is one block's work.
Where that counts, a third micro-batch size is rehearsed (`outline.Line`, `outline.Outline.reaches`).

A model that goes through its batch sample by sample does more in a step of more samples; what it does between is the
same, and is found again.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bigdit.memory import CATEGORIES, CUDA_GRANULARITY, Timeline

Bytes = npt.NDArray[np.float64]
Marks = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpanMoments:
    """One span of a timeline: `live` bytes after each of its events, of which `marks` say which they are; `parts` are
    those bytes by category, a row for each of CATEGORIES."""

    phase: str
    live: Bytes
    parts: Bytes
    marks: Marks


def moments(timeline: Timeline) -> tuple[SpanMoments, ...]:
    """Every span of `timeline`, its first moment being what the one before it left."""
    mark_of = [zlib.crc32(re.sub(r"\d+", "#", block.label).encode()) + 1 for block in timeline.blocks]
    row_of = {category: row for row, category in enumerate(CATEGORIES)}
    found, start = [], np.zeros(len(CATEGORIES))
    for span in timeline.spans:
        events = timeline.events[span.start : span.stop]
        parts = np.zeros((len(CATEGORIES), len(events) + 1))
        parts[:, 0] = start
        for at, (block, change) in enumerate(timeline.changes(span, CUDA_GRANULARITY), start=1):
            parts[row_of[block.category], at] = change
        parts = np.cumsum(parts, axis=1)
        marks = [0, *(mark_of[event - 1] if event > 0 else -mark_of[-event - 1] for event in events)]
        found.append(SpanMoments(span.phase, parts.sum(axis=0), parts, np.array(marks, dtype=np.int64)))
        start = parts[:, -1]
    return tuple(found)


def counterparts(short: Marks, long: Marks) -> Marks:
    """For each moment of `short` the one of `long` that it is; -1 where there is none.

    The beginnings are the same up to where the longer one has more blocks, and so are the ends.
    """
    length, rest = len(short), len(long) - len(short)
    prefix, suffix = _alike(short, long), _alike(short[::-1], long[::-1])
    at = np.arange(length)
    if prefix + suffix < length:
        return np.where(at < prefix, at, np.where(at >= length - suffix, at + rest, -1))
    # Both ways lead through the blocks that the shorter one has: half of them are the first, half the last.
    split = (length - suffix + prefix) // 2
    return np.where(at < split, at, at + rest)


def around(short: Marks, long: Marks) -> Marks:
    """The same of the moments around the middle, where `long` has more blocks in each half, since skips join those of
    the first to those of the second: what skips hold there grows, and no moment counted from an end comes to it.
    """
    at = np.arange(len(short))
    if len(long) == len(short):
        return at
    middle = (len(short) - _alike(short[::-1], long[::-1]) + _alike(short, long)) // 2

    def alike(more: int) -> tuple[int, int]:
        """How many are the same before the middle, and behind it."""
        before = _alike(short[:middle][::-1], long[: middle + more][::-1])
        return before, _alike(short[middle:], long[middle + more :])

    more = max(range(1, len(long) - len(short)), key=lambda more: sum(alike(more)))
    before, after = alike(more)
    return np.where((at >= middle - before) & (at < middle + after), at + more, -1)


def resized(few: Marks, many: Marks) -> Marks:
    """For each moment of few samples that of `many`, which the same blocks go through; -1 where there is none.

    Of all ways to pass over what is done for further samples, the one on which most moments are the same.
    """
    more = len(many) - len(few)
    if more < 0:
        return counterparts(few, many)
    if more == 0:
        return np.where(few == many, np.arange(len(few)), -1)
    passing = np.lib.stride_tricks.sliding_window_view(many, len(few))
    alike = few[:, None] == passing.T  # for each moment, whether it is the same with so many passed over
    best = np.zeros((len(few), more + 1), dtype=np.int32)  # so many are the same up to a moment, at most
    before = best[0]
    for at, same in enumerate(alike):
        best[at] = np.maximum.accumulate(before) + same
        before = best[at]
    found, passed = np.full(len(few), -1), more
    for at in range(len(few) - 1, -1, -1):
        passed = int(best[at, : passed + 1].argmax())
        if alike[at, passed]:
            found[at] = at + passed
    return found


def _alike(one: Marks, other: Marks) -> int:
    """How many moments of both are the same from the beginning on."""
    least = min(len(one), len(other))
    same = one[:least] == other[:least]
    return least if same.all() else int(same.argmin())


@dataclass(frozen=True)
class Family:
    """Like rehearsals, span by span: `first` moment for moment, with what is live there in each of them.

    `live` of a span is (rehearsals, moments), its first column the span's peak, which is continued beside the
    moments: a lower bound where moments could not be found again. Between two sizes it is an upper one, so that of
    three it is not continued where all were found. The second is the span's first moment, the last its last; of the
    start there is none between. `parts` are the same by category: (rehearsals, CATEGORIES, moments).
    """

    phases: tuple[str, ...]
    live: tuple[Bytes, ...]
    parts: tuple[Bytes, ...]


def family(rehearsals: Sequence[Sequence[tuple[SpanMoments, ...]]], *, halved: bool = False) -> Family:
    """The moments that all share, of a row of siblings for each micro-batch size; of those that are `halved` the ones
    `around` the middle too. Raises ValueError where their phases differ."""
    every = [spans for row in rehearsals for spans in row]
    phases = tuple(span.phase for span in every[0])
    if any(tuple(span.phase for span in other) != phases for other in every):
        raise ValueError(f"rehearsals with phases other than {', '.join(phases)}")
    live, parts = [], []
    for number in range(len(phases)):
        rows = [[spans[number] for spans in row] for row in rehearsals]
        spans = [span for row in rows for span in row]
        ends = _shared(rows, counterparts)
        if phases[number] == "init":  # weights come alike, of whatever list of blocks: no moment is told from the next
            ends = ends[:, [0, -1]]
        middle = _shared(rows, around) if halved else ends[:, :0]
        known = len(rows) > 2 and not halved and ends.shape[1] == len(spans[0].live)
        peaks = ends[:, :1] if known else np.array([[span.live.argmax()] for span in spans])
        columns = np.concatenate([peaks, ends[:, :1], middle, ends[:, 1:]], axis=1)
        live.append(np.stack([span.live[at] for span, at in zip(spans, columns, strict=True)]))
        parts.append(np.stack([span.parts[:, at] for span, at in zip(spans, columns, strict=True)]))
    return Family(phases, tuple(live), tuple(parts))


def _shared(rows: Sequence[Sequence[SpanMoments]], deeper: Callable[[Marks, Marks], Marks]) -> Marks:
    """The moments that all spans have, a row for each: found in those that are `deeper` once, at the first micro-batch
    size, so that at each size they are in the same blocks."""
    first = rows[0]
    found = [deeper(first[0].marks, span.marks) for span in first]
    sizes = [[resized(span.marks, other.marks) for span, other in zip(first, row, strict=True)] for row in rows]
    shared = np.stack([np.where(at >= 0, same[at], -1) for row in sizes for at, same in zip(found, row, strict=True)])
    return shared[:, np.all(shared >= 0, axis=0)]
