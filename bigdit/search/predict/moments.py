"""What is live at every moment of a rehearsed step, and how that grows with the micro-batch and with each block.

Between two rehearsals of like blocks every moment of the shorter one is found again in the longer one: all up to the
first block's end from the start, all from the last block on from the end. What is live at such a moment is affine in
the micro-batch size, since every tensor is, and in the number of blocks, since each adds the same; its maximum over
moments is not. So moments are continued, and the peak is read off them. What kernels take within an operation is taken
to grow so too, and does not: a reduction's buffer grows until its blocks fill the card. A prediction is off by no more.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
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
    least = min(length, len(long))
    same = short[:least] == long[:least]
    prefix = least if same.all() else int(same.argmin())
    same = short[::-1][:least] == long[::-1][:least]
    suffix = least if same.all() else int(same.argmin())
    at = np.arange(length)
    if prefix + suffix < length:
        return np.where(at < prefix, at, np.where(at >= length - suffix, at + rest, -1))
    # Both ways lead through the blocks that the shorter one has: half of them are the first, half the last.
    split = (length - suffix + prefix) // 2
    return np.where(at < split, at, at + rest)


@dataclass(frozen=True)
class Family:
    """Like rehearsals, span by span: `first` moment for moment, with what is live there in each of them.

    `live` of a span is (rehearsals, moments), its first column the span's peak, which is continued beside the
    moments: a lower bound where moments could not be found again. `parts` are the same by category: (rehearsals,
    CATEGORIES, moments).
    """

    phases: tuple[str, ...]
    live: tuple[Bytes, ...]
    parts: tuple[Bytes, ...]


def family(rehearsals: Sequence[tuple[SpanMoments, ...]]) -> Family:
    """The moments that all `rehearsals` share. Raises ValueError where their phases differ."""
    first = rehearsals[0]
    phases = tuple(span.phase for span in first)
    if any(tuple(span.phase for span in other) != phases for other in rehearsals):
        raise ValueError(f"rehearsals with phases other than {', '.join(phases)}")
    live, parts = [], []
    for number in range(len(phases)):
        spans = [rehearsal[number] for rehearsal in rehearsals]
        found = [counterparts(spans[0].marks, span.marks) for span in spans]
        shared = np.all([at >= 0 for at in found], axis=0)
        columns = [np.concatenate([[span.live.argmax()], at[shared]]) for span, at in zip(spans, found, strict=True)]
        live.append(np.stack([span.live[at] for span, at in zip(spans, columns, strict=True)]))
        parts.append(np.stack([span.parts[:, at] for span, at in zip(spans, columns, strict=True)]))
    return Family(phases, tuple(live), tuple(parts))
