"""A timeline as a snapshot of CUDA memory, for the page that draws it: https://pytorch.org/memory_viz.

The format is that of torch.cuda.memory._snapshot: a pickle of dicts, lists, tuples, strings, integers and booleans. It
is written here and never read: bigdit opens no pickle.

Source: torch/cuda/memory.py, `_snapshot`; torch/cuda/_memory_viz.py; torch/utils/viz/MemoryViz.js, which reads pickle
protocols 2 to 4.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigdit.files import replacing
from bigdit.memory.allocator import Playback
from bigdit.memory.caching import Block, Change, OutOfMemory
from bigdit.memory.timeline import Timeline
from bigdit.units import GIB

NO_LIMIT = 1024 * GIB
"""More than any card has."""

DEFAULT_POOL = (0, 0)
"""The id of the pool of everything that no CUDA graph and no MemPool has."""

PROTOCOL = 4
"""The newest of pickle's protocols that the page reads."""

NO_CATEGORY = "unknown"
"""What the page calls entries without a category, which it must see once where others have one."""

Entry = dict[str, Any]


def write_snapshot(
    timeline: Timeline, path: Path, *, capacity_bytes: int = NO_LIMIT, expandable_segments: bool = False
) -> None:
    """Write the `snapshot` of a timeline. Raises UserError where the file cannot be written."""
    found = snapshot(timeline, capacity_bytes=capacity_bytes, expandable_segments=expandable_segments)
    with replacing(path) as temporary:
        temporary.write_bytes(pickle.dumps(found, protocol=PROTOCOL))


def snapshot(
    timeline: Timeline, *, capacity_bytes: int = NO_LIMIT, expandable_segments: bool = False
) -> dict[str, list[Any]]:
    """Every event where the allocator's replay puts it, and the segments as they are at the end.

    The page goes back in time from there, and colours by category. A timeline that runs out of memory ends with
    that. A frame is the label of a block in its category, called by the phase; the time is the number of the event.
    """
    writer = _Writer(timeline, capacity_bytes, expandable_segments)
    for span in timeline.spans:
        for at in range(span.start, span.stop):
            if not writer.step(at, span.phase):
                return writer.snapshot()
    return writer.snapshot()


class _Writer:
    """The trace so far, and the replay that it follows."""

    def __init__(self, timeline: Timeline, capacity_bytes: int, expandable_segments: bool) -> None:
        self._timeline = timeline
        self._playback = Playback(
            timeline, capacity_bytes, expandable_segments=expandable_segments, on_change=self._note_segment
        )
        self._expandable = expandable_segments
        self._trace: list[Entry] = []
        self._frames: dict[int, list[Entry]] = {}  # by the event of allocation
        self._addresses: dict[int, int] = {}  # likewise; a block forgets its own when it is freed
        self._now: Entry = {}  # what entries of the event at hand have in common

    def step(self, at: int, phase: str) -> bool:
        """Do event `at` and trace it; False where memory ran out."""
        event = self._timeline.events[at]
        asked = self._timeline.blocks[abs(event) - 1]
        if event > 0:
            self._frames[event] = [_frame(asked.label, asked.category), _frame(phase, "phase")]
        self._now = {"time_us": at, "frames": self._frames[abs(event)], "pool_id": DEFAULT_POOL}
        try:
            block = self._playback.step(at)
        except OutOfMemory:
            device = self._playback.device
            free = {"device_free": device.capacity_bytes - device.reserved_bytes}
            self._trace.append({"action": "oom", "size": asked.nbytes, "stream": asked.stream} | free | self._now)
            return False
        if block is None:
            return True
        if event > 0:
            self._addresses[event] = block.address
            self._note("alloc", block.address, asked.nbytes, asked.stream, asked.category)
        else:
            for action in ("free_requested", "free_completed"):
                self._note(action, self._addresses[-event], asked.nbytes, asked.stream, asked.category)
        return True

    def _note_segment(self, change: Change, address: int, nbytes: int, stream: int) -> None:
        self._note(change, address, nbytes, stream, NO_CATEGORY)

    def _note(self, action: str, address: int, nbytes: int, stream: int, category: str) -> None:
        entry = {"action": action, "addr": address, "size": nbytes, "stream": stream, "category": category}
        self._trace.append(entry | self._now)

    def snapshot(self) -> dict[str, list[Any]]:
        blocks = [*self._playback.live.values(), *self._playback.allocator.free_blocks()]
        events = {block.address: event for event, block in self._playback.live.items()}
        heads = (block for block in blocks if block.prev is None or not block.prev.mapped)
        segments = [self._segment(head, events) for head in sorted(heads, key=lambda block: block.address)]
        return {"segments": segments, "device_traces": [self._trace]}

    def _segment(self, head: Block, events: dict[int, int]) -> Entry:
        """A segment, or a run of mapped pages of one, from its first block on."""
        parts = [self._block(block, events) for block in _run(head)]
        in_use = [part for part in parts if part["state"] == "active_allocated"]
        allocated = sum(part["size"] for part in in_use)
        return {
            "device": 0,
            "address": head.address,
            "total_size": sum(part["size"] for part in parts),
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(part["requested_size"] for part in in_use),
            "stream": head.pool.stream,
            "segment_type": "small" if head.pool.is_small else "large",
            "segment_pool_id": DEFAULT_POOL,
            "is_expandable": self._expandable,
            "frames": [],
            "blocks": parts,
        }

    def _block(self, block: Block, events: dict[int, int]) -> Entry:
        part = {"address": block.address, "size": block.size}
        if not block.allocated:
            return part | {"requested_size": 0, "state": "inactive", "frames": []}
        event = events[block.address]
        requested = self._timeline.blocks[event - 1].nbytes
        return part | {"requested_size": requested, "state": "active_allocated", "frames": self._frames[event]}


def _run(head: Block) -> Iterator[Block]:
    block: Block | None = head
    while block is not None and block.mapped:
        yield block
        block = block.next


def _frame(name: str, filename: str) -> Entry:
    return {"name": name, "filename": filename, "line": 0}
