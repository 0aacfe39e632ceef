"""Record every storage that torch allocates and frees on a GPU, and on its host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bigdit.memory import Block, Category, Span, Timeline
from bigdit.record.costs import Counting, is_wrapper
from bigdit.record.history import History
from bigdit.record.in_place import replaced

HOST = "cpu"
_PIN = torch.ops.aten._pin_memory.default
_TO = torch.ops.aten._to_copy.default


class Recorder(Counting):
    """The storages seen under this mode: of the GPU whose allocator has this `history`, and of the host.

    A storage is new when an operation returns a tensor on it for the first time; views share it. It is freed when its
    finaliser runs. FSDP2 frees by resizing a storage to nothing, which no operation and no finaliser sees:
    `UntypedStorage.resize_` is hooked while the mode is on. What a kernel takes within one operation is in the history.

    Frees follow reference counts. A cycle would live until the garbage collector happens to run, which no two runs
    agree on: automatic collection is off while the mode is on, and a full one closes each phase. It, and all later
    ones, pass over what was there before. Where automatic collection was off already it stays off.
    """

    def __init__(self, history: History | None = None) -> None:
        super().__init__()
        self._history = history
        self._tracks = {HOST: _Track()}
        if history is not None:
            self._tracks["cuda"] = _Track(history.see)
        self._callers: list[tuple[str, Category | None]] = []
        self._collect = self._froze = False

    def __enter__(self) -> Recorder:
        self._collect = gc.isenabled()
        gc.disable()
        self._froze = gc.get_freeze_count() == 0
        gc.freeze()  # what exists by now is not this recording's garbage: collections stay cheap
        self._hooks.enter_context(replaced(torch.UntypedStorage, "resize_", self._seeing))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._collect:
            gc.enable()
        if self._froze:  # else the process has frozen its libraries itself, and leaves without taking them apart
            gc.unfreeze()  # what stays frozen to its end, libraries such as Triton tell of as leaked

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation, whose storages are known from here on."""
        if self._history is not None:
            self._history.begin(func)
        result = super().run(func, args, kwargs)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, func)
        # Torch puts copies to the host that nobody waits for into page-locked memory.
        # Source: `_to_copy` in aten/src/ATen/native/TensorConversions.cpp.
        unawaited = func is _TO and kwargs.get("non_blocking") and args[0].is_cuda and result.device.type == HOST
        if func is _PIN or kwargs.get("pin_memory") or unawaited:
            self._tracks[HOST].pin(result.untyped_storage())
        return result

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens from here until the next phase begins belongs to `name`.

        Where `backward` follows, what `forward` allocated and still lives is a saved activation.
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
        """New storages in here are labelled with the call; they are of this category where no mark says another."""
        self._callers.append((label, category))
        try:
            yield
        finally:
            self._callers.pop()

    def mark(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None:
        """The storages of `tensors` are of this category, from their allocation on, wherever they are.

        The first mark stays. A storage that was allocated unseen (numpy's, or from before the recording) is
        allocated here and now.
        """
        for tensor in _plain(tensors):
            track = self._tracks.get(tensor.device.type)
            if track is not None:
                self._see(tensor, "unseen")
                track.mark(tensor.untyped_storage(), category)

    def mark_rest(self, category: Category) -> None:
        """What lives now, and nothing explained so far, is of this category."""
        for track in self._tracks.values():
            track.mark_live(category)

    def timeline(self) -> Timeline:
        """All that was recorded of the GPU, and what its operators and collectives did; the history ends."""
        assert self._history is not None
        return self._history.timeline(self.phases, self._tracks["cuda"].blocks(), self.costs)

    def host_timeline(self) -> Timeline:
        """What was recorded of the host so far."""
        track = self._tracks[HOST]
        stops = [*track.starts[1:], len(track.events)]
        spans = tuple(Span(*each) for each in zip(self.phases, track.starts, stops, strict=True))
        return Timeline(track.blocks(), tuple(track.events), spans)

    def _see(self, tensor: torch.Tensor, source: Any) -> None:
        if self.paused or is_wrapper(tensor.__class__):
            return
        track = self._tracks.get(tensor.device.type)
        if track is not None:
            label, category = self._callers[-1] if self._callers else (None, None)
            track.see(tensor.untyped_storage(), category, label or source)

    def _seeing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            for track in self._tracks.values():
                track.resized(storage)
            return result

        return resized


def _plain(tensors: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own that these consist of."""
    for tensor in filter(torch.is_tensor, tensors):  # a DTensor names its mesh, too
        if is_wrapper(tensor.__class__):
            yield from _plain(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


@dataclass(slots=True)
class _Known:
    """A block as far as it is known: a category is a guess until it is `marked`."""

    nbytes: int
    category: Category | None
    label: str
    pinned: bool = False
    marked: bool = False


class _Track:
    """Blocks and events of one device type; storages are known by address while they live.

    `seen` is called with each block's storage.
    """

    def __init__(self, seen: Callable[[torch.UntypedStorage], None] = lambda storage: None) -> None:
        self._seen = seen
        self.events: list[int] = []
        self.starts: list[int] = []
        self._known: list[_Known] = []
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # storage address -> finaliser, number of its block

    def see(self, storage: torch.UntypedStorage, category: Category | None, label: object) -> None:
        """A tensor on this storage exists: allocated now where it was not known, or where its size changed."""
        if not self.resized(storage):
            self._allocate(storage, _Known(storage.nbytes(), category, str(label)))

    def resized(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is known. Where it has another size now, it is freed and allocated anew."""
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
        """What was allocated since that event, still lives and has no category is of this one."""
        for number in {number for _, number in self._live.values()}.intersection(self.events[since:]):
            known = self._known[number - 1]
            known.category = known.category or category

    def blocks(self) -> tuple[Block, ...]:
        """All blocks so far. What nothing explains is temporary."""
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
