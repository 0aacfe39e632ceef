"""Memory as a record of allocations and frees on one device, and its sums. No torch is imported.

Events come from `record`. Non-torch memory is in `process.py`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Literal, get_args

from pydantic import NonNegativeInt, PositiveInt

from bigdit.strategy import Strict

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

    `pinned`: page-locked CPU memory.
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
"""Where an operator computes, or the direction of a copy. `host`: the CPU."""


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """All calls of one operator with one dtype in one span: floating-point operations and bytes moved.

    For a copy between CPU and GPU the bytes are those that are copied.
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
        """Each event of `span` as its block and the bytes that it adds; negative for a free."""
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


CUDA_GRANULARITY = 512
"""The CUDA caching allocator counts every block in multiples of this many bytes.

Source: kMinBlockSize in pytorch/c10/core/AllocatorConfig.h.
"""


class PhasePeak(Strict):
    """The highest peak of a phase over all its occurrences, and its bytes by category.

    `at_peak` sums to `peak_bytes`. `end_bytes` is the most that stayed allocated at the phase's end.
    """

    phase: str
    peak_bytes: NonNegativeInt
    end_bytes: NonNegativeInt
    at_peak: dict[Category, NonNegativeInt]


class Ledger(Strict):
    """Peak allocated bytes by phase; each block counts in multiples of `granularity`."""

    granularity: PositiveInt
    phases: tuple[PhasePeak, ...]

    @property
    def deciding(self) -> PhasePeak:
        """The phase with the highest peak; the first of equal ones."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def peak_allocated_bytes(self) -> int:
        return self.deciding.peak_bytes

    @property
    def at_peak(self) -> dict[Category, int]:
        """Allocated bytes at the peak by category; they sum to `peak_allocated_bytes`."""
        return self.deciding.at_peak


def ledger(timeline: Timeline, granularity: int = CUDA_GRANULARITY) -> Ledger:
    """Sum up `timeline`. `granularity` is 512 for CUDA's caching allocator, and 1 for requested bytes."""
    found: dict[str, PhasePeak] = {}
    live: Counter[Category] = Counter()
    for span in timeline.spans:
        now = peak = live.total()
        at_peak = live.copy()
        for block, change in timeline.changes(span, granularity):
            live[block.category] += change
            now += change
            if now > peak:
                peak, at_peak = now, live.copy()
        parts = {category: at_peak[category] for category in CATEGORIES if at_peak[category]}
        this = PhasePeak(phase=span.phase, peak_bytes=peak, end_bytes=now, at_peak=parts)
        old = found.get(span.phase, this)
        highest = max(old, this, key=lambda each: each.peak_bytes)
        found[span.phase] = highest.model_copy(update={"end_bytes": max(old.end_bytes, now)})
    return Ledger(granularity=granularity, phases=tuple(found.values()))


class HostMemory(Strict):
    """CPU memory of one process's tensors, pageable and page-locked together: its peak, and its peak after the start.

    `page_locked_bytes`: the pinned allocator's memory at the end, with free blocks. It stays locked until the process
    ends, and counts against the machine's limit.
    """

    peak_bytes: NonNegativeInt
    steps_bytes: NonNegativeInt
    page_locked_bytes: NonNegativeInt

    def saving(self, checkpoint_bytes: int) -> int:
        """The peak of start, steps, and a save between steps that copies so many bytes."""
        return max(self.peak_bytes, self.steps_bytes + checkpoint_bytes)


def pinned_bytes(nbytes: int) -> int:
    """The size of the pinned allocator's block for `nbytes`: the next power of two.

    Source: CachingHostAllocatorImpl::allocate in aten/src/ATen/core/CachingHostAllocator.h, torch 2.13, as
    configured without PYTORCH_ALLOC_CONF.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def host_memory(timeline: Timeline) -> HostMemory:
    """Replay a timeline of CPU memory: pageable tensors by their bytes, pinned ones through the pinned allocator.

    A freed pinned block serves the next request of its size at once. The real allocator waits for copies that still
    read it, and may take another block.
    """
    free: Counter[int] = Counter()
    started = max((span.stop for span in timeline.spans if span.phase == "init"), default=0)
    pageable = locked = peak = steps = 0
    for at, event in enumerate(timeline.events, 1):
        block = timeline.blocks[abs(event) - 1]
        size = pinned_bytes(block.nbytes)
        if not block.pinned:
            pageable += block.nbytes if event > 0 else -block.nbytes
        elif event < 0:
            free[size] += 1
        elif free[size]:
            free[size] -= 1
        else:
            locked += size
        peak = max(peak, pageable + locked)
        if at >= started:
            steps = max(steps, pageable + locked)
    return HostMemory(peak_bytes=peak, steps_bytes=steps, page_locked_bytes=locked)
