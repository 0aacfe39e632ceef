"""Records every storage that torch allocates and frees on a GPU and in CPU memory."""

from __future__ import annotations

import bisect
import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bigdit.memory import Block, Category, Span, Timeline
from bigdit.record.costs import COMPILED, Costs, Counting, is_wrapper, replaced

HOST = "cpu"
_PIN = torch.ops.aten._pin_memory.default
_TO = torch.ops.aten._to_copy.default


class Recorder(Counting):
    """Storages under this mode, of CPU memory and of the GPU whose allocator has this `history`.

    A storage is new when an operation first returns a tensor on it; views share it. It is freed when its finaliser
    runs. FSDP2 frees a storage by resizing it to 0, which no operation and no finaliser sees. So the mode hooks
    `UntypedStorage.resize_`. The history has what a kernel takes within one operation.

    Frees follow reference counts. Cycles would wait for the garbage collector, whose time differs from run to run. So
    the mode turns automatic collection off, and collects at the end of each phase. If automatic collection was off
    before, it stays off.
    """

    def __init__(self, history: History | None = None) -> None:
        super().__init__()
        self._history = history
        self._tracks = {HOST: _Track()}
        if history is not None:
            self._tracks["cuda"] = _Track(history.see)
        self._callers: list[tuple[str, Category | None]] = []
        self._collect = False

    def __enter__(self) -> Recorder:
        self._collect = gc.isenabled()
        gc.disable()
        self._hooks.enter_context(replaced(torch.UntypedStorage, "resize_", self._watch_resize))
        # Compiled code allocates with this function, which is no operation.
        self._hooks.enter_context(replaced(torch._C._dynamo.guards, "_empty_strided_cuda", self._watch_allocation))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._collect:
            gc.enable()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation. Its storages are recorded."""
        if self._history is not None and not func.is_view:  # a view allocates nothing
            self._history.begin(func)
        result = super().run(func, args, kwargs)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, func)
        # Torch puts non-blocking copies to the CPU into page-locked memory.
        # Source: `_to_copy` in aten/src/ATen/native/TensorConversions.cpp.
        unawaited = func is _TO and kwargs.get("non_blocking") and args[0].is_cuda and result.device.type == HOST
        if func is _PIN or kwargs.get("pin_memory") or unawaited:
            self._tracks[HOST].pin(result.untyped_storage())
        return result

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """All until the next phase belongs to `name`.

        Before `backward`, all that `forward` allocated and did not free is a saved activation.
        """
        if name == "backward" and self.phases and self.phases[-1] == "forward":
            for track in self._tracks.values():
                track.mark_live("saved activation", since=track.starts[-1])
        self.phases.append(name)
        if self._history is not None:
            self._history.start_phase()
        for track in self._tracks.values():
            track.starts.append(len(track.events))
        yield
        gc.collect()

    def enter_module(self, name: str) -> None:
        """Until `leave_module`, new storages are labelled with this module's name."""
        # A module that runs in the backward pass is a checkpoint recomputing its activations.
        recomputes = bool(self.phases) and self.phases[-1] == "backward"
        self._callers.append((name, "recomputed activation" if recomputes else None))

    def leave_module(self) -> None:
        self._callers.pop()

    @contextmanager
    def call(self, label: str, category: Category) -> Iterator[None]:
        """New storages within get this label, and this category unless a mark has another."""
        self._callers.append((label, category))
        try:
            yield
        finally:
            self._callers.pop()

    def mark(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None:
        """The storages of `tensors` have this category, from their allocation on.

        The first mark stays. A storage whose allocation was not seen (by numpy, or before the recording) counts as
        allocated now.
        """
        for tensor in _plain(tensors):
            track = self._tracks.get(tensor.device.type)
            if track is not None:
                self._see(tensor, "unseen")
                track.mark(tensor.untyped_storage(), category)

    def mark_rest(self, category: Category) -> None:
        """All allocated storages without a category get this one."""
        for track in self._tracks.values():
            track.mark_live(category)

    def timeline(self) -> Timeline:
        """The GPU's timeline, with the work of operators and collectives. Ends the history."""
        assert self._history is not None
        return self._history.timeline(self.phases, self._tracks["cuda"].blocks(), self.costs)

    def host_timeline(self) -> Timeline:
        """The timeline of CPU memory so far."""
        track = self._tracks[HOST]
        stops = [*track.starts[1:], len(track.events)]
        spans = tuple(Span(*each) for each in zip(self.phases, track.starts, stops, strict=True))
        return Timeline(track.blocks(), tuple(track.events), spans)

    def _see(self, tensor: torch.Tensor, source: Any) -> None:
        if self.paused or is_wrapper(tensor.__class__):
            return
        track = self._tracks.get("cuda" if tensor.is_cuda else tensor.device.type)
        if track is not None:
            label, category = self._callers[-1] if self._callers else (None, None)
            track.see(tensor.untyped_storage(), category, label or source)

    def _watch_allocation(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocated(*args: Any) -> Any:
            tensor = allocate(*args)
            self._see(tensor, COMPILED)
            return tensor

        return allocated

    def _watch_resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            for track in self._tracks.values():
                track.resized(storage)
            return result

        return resized


def _plain(tensors: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """The plain tensors within these, which own the memory."""
    for tensor in filter(torch.is_tensor, tensors):  # a DTensor names its mesh, too
        if is_wrapper(tensor.__class__):
            yield from _plain(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


@dataclass(slots=True)
class _Known:
    """A block. Its category is a guess until it is `marked`."""

    nbytes: int
    category: Category | None
    label: str
    pinned: bool = False
    marked: bool = False


class _Track:
    """Blocks and events of one device type. While allocated, a storage is identified by its address.

    `seen` is called with each block's storage.
    """

    def __init__(self, seen: Callable[[torch.UntypedStorage], None] = lambda storage: None) -> None:
        self._seen = seen
        self.events: list[int] = []
        self.starts: list[int] = []
        self._known: list[_Known] = []
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # storage address -> finaliser, number of its block

    def see(self, storage: torch.UntypedStorage, category: Category | None, label: object) -> None:
        """Record a storage on which a tensor exists: allocate it if it is new, or if its size changed."""
        if not self.resized(storage):
            self._allocate(storage, _Known(storage.nbytes(), category, str(label)))

    def resized(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is known. If its size changed, it is freed and allocated again."""
        known = self._of(storage)
        if known is not None and known.nbytes != storage.nbytes():
            self.events.append(-self._live[storage._cdata][1])
            self._allocate(storage, replace(known, nbytes=storage.nbytes(), pinned=False))
        return known is not None

    def mark(self, storage: torch.UntypedStorage, category: Category) -> None:
        """The block of this storage is of this category, from its allocation on."""
        known = self._of(storage)
        if known is not None and not known.marked:
            known.category, known.marked = category, True

    def pin(self, storage: torch.UntypedStorage) -> None:
        """The block of this storage is page-locked host memory."""
        known = self._of(storage)
        if known is not None:
            known.pinned = True

    def mark_live(self, category: Category, since: int = 0) -> None:
        """Give this category to blocks since that event that are still allocated and have none."""
        for number in {number for _, number in self._live.values()}.intersection(self.events[since:]):
            known = self._known[number - 1]
            known.category = known.category or category

    def blocks(self) -> tuple[Block, ...]:
        """All blocks so far. One without a category is temporary."""
        return tuple(Block(each.nbytes, each.category or "temporary", each.label, each.pinned) for each in self._known)

    def _of(self, storage: torch.UntypedStorage) -> _Known | None:
        entry = self._live.get(storage._cdata)
        return None if entry is None else self._known[entry[1] - 1]

    def _allocate(self, storage: torch.UntypedStorage, known: _Known) -> None:
        self._known.append(known)
        address, number = storage._cdata, len(self._known)
        self.events.append(number)
        self._seen(storage)
        freed = weakref.ref(storage, lambda _: self.events.append(-self._live.pop(address)[1]))
        self._live[address] = (freed, number)


_ALL = 1 << 40
"""More events than any recording has."""


class History:
    """The events of torch's allocator on the current device, from its creation on.

    Blocks that the recorder knows get their category and label from it. All others are workspace of the operation that
    ran. Each event has the number of the note before it in the allocator's metadata, which is faster than counting
    events. With `stacks` each allocation has its Python stack, and `snapshot` is kept for torch's memory_viz.
    """

    def __init__(self, *, stacks: bool = False) -> None:
        context = "alloc" if stacks else None
        torch.cuda.memory._record_memory_history(enabled="all", context=context, stacks="python", max_entries=_ALL)
        self._stacks = stacks
        self.snapshot: dict[str, Any] | None = None
        """The result of torch.cuda.memory._snapshot at the end, with labels and categories."""
        self._device = torch.cuda.current_device()
        self._before = self._total()
        self._notes: list[Any] = ["before the first operation"]  # which operation runs from each note on
        self._seen: list[tuple[int, int]] = []  # note and address of each storage
        self._starts: list[int] = []  # the note of each phase
        self.peaks: list[int] = []
        """Peak bytes of each phase, by torch's own counter."""
        self.peak_reserved_bytes = 0

    def begin(self, operation: Any) -> None:
        """An operation runs from here on, until the next one begins."""
        torch._C._cuda_setMemoryMetadata(str(len(self._notes)))
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
        """The timeline until now; ends the history. `known`: the recorder's blocks, in the order of `see`.

        Raises RuntimeError if the allocator counted another number of events than its history has.
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
        events, live, described = list[int](), dict[int, int](), list[tuple[int, Category, object]]()
        at: dict[int, list[tuple[int, int]]] = defaultdict(list)  # note and block of each allocation, by address
        for entry, note in zip(trace, notes, strict=True):
            address = entry["addr"]
            if entry["action"] == "alloc":
                at[address].append((note, len(described)))
                described.append((entry["size"], "workspace", self._notes[note]))
                live[address] = len(described)
                events.append(len(described))
            else:
                events.append(-live.pop(address))
        for (note, address), seen in zip(self._seen, known, strict=True):
            # The storage is in the last block that was allocated at its address before.
            earlier = bisect.bisect_left(at[address], (note, 0)) - 1
            if earlier >= 0:
                block = at[address][earlier][1]
                described[block] = described[block][0], seen.category, seen.label
        return [Block(size, category, str(label)) for size, category, label in described], events

    def _end_phase(self) -> None:
        if self._starts:
            self.peaks.append(torch.cuda.max_memory_allocated())
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, torch.cuda.max_memory_reserved())

    def _total(self) -> int:
        counts = torch._C._cuda_memoryStats(self._device)["allocation"]["all"]
        return int(counts["allocated"] + counts["freed"])


def _label(trace: Sequence[dict[str, Any]], blocks: Sequence[Block]) -> None:
    """Put the block's label and category before the stack of each allocation.

    memory_viz colours by category if at least one entry is `unknown`.
    """
    following = iter(blocks)
    for entry in trace:
        entry["category"], entry["user_metadata"] = "unknown", ""
        if entry["action"] == "alloc":
            block = next(following)
            own = {"name": block.label, "filename": block.category, "line": 0}
            entry["frames"], entry["category"] = [own, *entry["frames"]], block.category
