"""What the CUDA caching allocator did while a recorder watched, with what kernels took within operations."""

from __future__ import annotations

import bisect
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
    With `stacks` each allocation has its Python stack, and `snapshot` is kept for torch's page.
    """

    def __init__(self, *, stacks: bool = False) -> None:
        context = "alloc" if stacks else None
        torch.cuda.memory._record_memory_history(enabled="all", context=context, stacks="python", max_entries=_ALL)
        self._stacks = stacks
        self.snapshot: dict[str, Any] | None = None
        """What torch.cuda.memory._snapshot says at the end, with labels and categories."""
        self._device = torch.cuda.current_device()
        self._before = self._total()
        self._begun: list[int] = []
        self._operations: list[Any] = []
        self._seen: list[tuple[int, int]] = []
        self._starts: list[int] = []
        self.peaks: list[int] = []
        """Of each phase, by torch's own counter, in bytes."""
        self.peak_reserved_bytes = 0

    def begin(self, operation: Any) -> None:
        """An operation runs from here on, until the next one begins."""
        self._begun.append(self._count())
        self._operations.append(operation)

    def see(self, storage: torch.UntypedStorage) -> None:
        """The recorder's next block is this storage."""
        self._seen.append((self._count(), storage.data_ptr()))

    def start_phase(self) -> None:
        """A phase begins here, and the one before it ends."""
        self._end_phase()
        torch.cuda.reset_peak_memory_stats()
        self._starts.append(self._count())

    def timeline(self, phases: Sequence[str], known: Sequence[Block], costs: Costs) -> Timeline:
        """Everything until now; the history ends. `known`: the recorder's blocks, in the order of `see`.

        Raises RuntimeError where the allocator counted another number of events than its history has.
        """
        self._end_phase()
        stop = self._count()
        found = torch.cuda.memory._snapshot()
        trace = found["device_traces"][self._device]
        torch.cuda.memory._record_memory_history(enabled=None)
        blocks, events = self._read(trace, known)
        if self._stacks:
            _label(trace, blocks)
            self.snapshot = found
        if len(events) != stop:
            raise RuntimeError(f"the allocator counted {stop} events, and its history has {len(events)}")
        ends = [*self._starts[1:], stop]
        spans = tuple(Span(*each) for each in zip(phases, self._starts, ends, strict=True))
        return Timeline(blocks, events, spans, costs.collectives(), costs.operators())

    def _read(
        self, trace: Sequence[dict[str, Any]], known: Sequence[Block]
    ) -> tuple[tuple[Block, ...], tuple[int, ...]]:
        """Blocks and events."""
        blocks: list[Block] = []
        events: list[int] = []
        live: dict[int, int] = {}
        at: dict[int, list[tuple[int, int]]] = defaultdict(list)  # event and block of each allocation, by address
        for entry in trace:
            action, address = entry["action"], entry["addr"]
            if action == "alloc":
                at[address].append((len(events), len(blocks)))
                blocks.append(Block(entry["size"], "workspace", self._operation(len(events))))
                live[address] = len(blocks)
                events.append(len(blocks))
            elif action == "free_requested":
                events.append(-live.pop(address))
        for (event, address), seen in zip(self._seen, known, strict=True):
            # The storage stands in what was allocated last at its address.
            earlier = bisect.bisect_left(at[address], (event, 0)) - 1
            if earlier >= 0:
                block = at[address][earlier][1]
                blocks[block] = replace(blocks[block], category=seen.category, label=seen.label)
        return tuple(blocks), tuple(events)

    def _operation(self, event: int) -> str:
        """The operation that ran when this event came."""
        begun = bisect.bisect_right(self._begun, event) - 1
        return str(self._operations[begun]) if begun >= 0 else "before the first operation"

    def _end_phase(self) -> None:
        if self._starts:
            self.peaks.append(torch.cuda.max_memory_allocated())
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, torch.cuda.max_memory_reserved())

    def _count(self) -> int:
        return self._total() - self._before

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
        entry["category"] = "unknown"
        if entry["action"] == "alloc":
            block = next(following)
            own = {"name": block.label, "filename": block.category, "line": 0}
            entry["frames"], entry["category"] = [own, *entry["frames"]], block.category
