"""What the CUDA caching allocator did while a recorder watched, with what kernels took within operations."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bigdit.memory import Block, Span, Timeline
from bigdit.record.costs import Costs

_ALL = 1 << 40
"""More events than any recording has."""


class History:
    """The events of torch's allocator on the current device, from here on. An event's number is its place among them.

    A block that the recorder knows has its category and label. Any other is workspace of the operation that ran.
    Each event carries the number of the note before it, as the allocator's metadata: asking how many events there
    were takes longer. With `stacks` each allocation has its Python stack, and `snapshot` is kept for torch's page.
    """

    def __init__(self, *, stacks: bool = False) -> None:
        context = "alloc" if stacks else None
        torch.cuda.memory._record_memory_history(enabled="all", context=context, stacks="python", max_entries=_ALL)
        self._stacks = stacks
        self.snapshot: dict[str, Any] | None = None
        """What torch.cuda.memory._snapshot says at the end, with labels and categories."""
        self._device = torch.cuda.current_device()
        self._before = self._total()
        self._notes: list[Any] = ["before the first operation"]  # which operation runs from each note on
        self._seen: list[tuple[int, int]] = []  # note and address of each storage
        self._starts: list[int] = []  # the note of each phase
        self.peaks: list[int] = []
        """Of each phase, by torch's own counter, in bytes."""
        self.peak_reserved_bytes = 0

    def begin(self, operation: Any) -> None:
        """An operation runs from here on, until the next one begins."""
        torch.cuda.memory._set_memory_metadata(str(len(self._notes)))
        self._notes.append(operation)

    def see(self, storage: torch.UntypedStorage) -> None:
        """The recorder's next block is this storage."""
        self._seen.append((len(self._notes), storage.data_ptr()))
        self.begin(self._notes[-1])

    def start_phase(self) -> None:
        """A phase begins here, and the one before it ends."""
        self._end_phase()
        torch.cuda.reset_peak_memory_stats()
        self._starts.append(len(self._notes))
        self.begin(self._notes[-1])

    def timeline(self, phases: Sequence[str], known: Sequence[Block], costs: Costs) -> Timeline:
        """Everything until now; the history ends. `known`: the recorder's blocks, in the order of `see`.

        Raises RuntimeError where the allocator counted another number of events than its history has.
        """
        self._end_phase()
        counted = self._total() - self._before
        found = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.memory._set_memory_metadata("")
        trace = found["device_traces"][self._device]
        own = [entry for entry in trace if entry["action"] in ("alloc", "free_requested")]
        if len(own) != counted:
            raise RuntimeError(f"the allocator counted {counted} events, and its history has {len(own)}")
        notes = [int(entry["user_metadata"] or 0) for entry in own]
        blocks, events = self._read(own, notes, known)
        if self._stacks:
            _label(trace, blocks)
            self.snapshot = found
        edges = [*(bisect.bisect_left(notes, note) for note in self._starts), counted]
        spans = tuple(Span(name, *each) for name, each in zip(phases, itertools.pairwise(edges), strict=True))
        return Timeline(tuple(blocks), tuple(events), spans, costs.collectives(), costs.operators())

    def _read(
        self, trace: Sequence[dict[str, Any]], notes: Sequence[int], known: Sequence[Block]
    ) -> tuple[list[Block], list[int]]:
        """Blocks and events."""
        blocks: list[Block] = []
        events: list[int] = []
        live: dict[int, int] = {}
        at: dict[int, list[tuple[int, int]]] = defaultdict(list)  # note and block of each allocation, by address
        for entry, note in zip(trace, notes, strict=True):
            address = entry["addr"]
            if entry["action"] == "alloc":
                at[address].append((note, len(blocks)))
                blocks.append(Block(entry["size"], "workspace", str(self._notes[note])))
                live[address] = len(blocks)
                events.append(len(blocks))
            else:
                events.append(-live.pop(address))
        for (note, address), seen in zip(self._seen, known, strict=True):
            # The storage stands in what was allocated last at its address.
            earlier = bisect.bisect_left(at[address], (note, 0)) - 1
            if earlier >= 0:
                block = at[address][earlier][1]
                blocks[block] = replace(blocks[block], category=seen.category, label=seen.label)
        return blocks, events

    def _end_phase(self) -> None:
        if self._starts:
            self.peaks.append(torch.cuda.max_memory_allocated())
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, torch.cuda.max_memory_reserved())

    def _total(self) -> int:
        """Blocks that the allocator gave so far, and those that it took back."""
        counts = torch._C._cuda_memoryStats(self._device)["allocation"]["all"]
        return int(counts["allocated"] + counts["freed"])


def _label(trace: Sequence[dict[str, Any]], blocks: Sequence[Block]) -> None:
    """Put label and category of its block before the stack of each allocation.

    Torch's page colours by category where one entry at least is `unknown`.
    """
    following = iter(blocks)
    for entry in trace:
        entry["category"], entry["user_metadata"] = "unknown", ""
        if entry["action"] == "alloc":
            block = next(following)
            own = {"name": block.label, "filename": block.category, "line": 0}
            entry["frames"], entry["category"] = [own, *entry["frames"]], block.category
