"""Record every storage that torch allocates and frees on one kind of device, fake or real, and on its host."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from bigdit.memory import Category, Span, Timeline
from bigdit.record.costs import Costs
from bigdit.record.fsdp2 import watching_fsdp2
from bigdit.record.history import History
from bigdit.record.in_place import WRITING, InPlace
from bigdit.record.track import Track

HOST = "cpu"
_DEVICE_OF = torch.ops.prim.device.default
_PROFILER = torch.ops.profiler
_RANGES = (_PROFILER._record_function_enter_new.default, _PROFILER._record_function_exit._RecordFunction)
_PIN = torch.ops.aten._pin_memory.default
_TO = torch.ops.aten._to_copy.default
Seen = Callable[[Any], None]
Rule = Callable[[Sequence[Any], Mapping[str, Any], Any, Seen, Seen], None]
"""What an operation allocates inside, told in its order: called with arguments and result, it shows the first `Seen`
results, and the second one what is taken beside them, each when its kernel takes it; and drops that when it does."""
Scratch = Callable[[Any], Rule | None]
"""The rule of an operation, where its kernel takes more than its results."""
Known = Callable[[Any, Sequence[Any], Mapping[str, Any]], tuple[Any] | None]
"""The result of an operation where it is known without running it, as that of fake tensors may be."""


class Recorder(TorchDispatchMode):
    """The storages of `device_type` seen under this mode, and the host's, each as a Timeline.

    A storage is new when an operation returns a tensor on it for the first time; views share it. It is freed
    when its finaliser runs. FSDP2 frees by resizing a storage to nothing, which no operation and no finaliser
    sees: `UntypedStorage.resize_` is hooked while the mode is on. What a kernel takes and gives back inside
    one operation is not seen, but told by `scratch`. Of a DTensor, or another wrapper, it sees the tensors within and
    what is done with them.

    Frees follow reference counts. A cycle would live until the garbage collector happens to run, which no two
    runs agree on: automatic collection is off while the mode is on, and a full one closes each phase. It, and all
    later ones, pass over what was there before. Where automatic collection was off already it stays off: garbage is
    then the process's own affair.

    Use as a context manager, inside FakeTensorMode where the tensors are fake.
    """

    def __init__(
        self,
        device_type: str,
        scratch: Scratch | None = None,
        known: Known | None = None,
        *,
        stacks: bool = False,
    ) -> None:
        super().__init__()
        self._scratch = scratch
        self._known = known
        self._device_type = device_type
        self._history = History(stacks=stacks) if device_type == "cuda" else None
        self._tracks = {HOST: Track(HOST)}
        self._tracks.setdefault(device_type, Track(device_type, self._history))
        self._phases: list[str] = []
        self._callers: list[tuple[str, Category | None]] = []
        self._costs = Costs(device_type)
        self._in_place = InPlace()
        self._hooks = ExitStack()
        self._collect = self._froze = False
        self._paused = False
        self.broke_in: str | None = None
        """The module or the engine's call in which an operation raised the first error."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping the compiler out takes its time at every operation

    def __enter__(self) -> Recorder:
        self._collect = gc.isenabled()
        gc.disable()
        self._froze = gc.get_freeze_count() == 0
        gc.freeze()  # what exists by now is not this recording's garbage: collections stay cheap
        self._hooks.enter_context(self._in_place.watching(self))
        self._hooks.enter_context(self._watching_resize())
        self._hooks.enter_context(self._passing_over_propagation())
        self._hooks.enter_context(watching_fsdp2(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        if self._collect:
            gc.enable()
        if self._froze:  # else the process has frozen its libraries itself, and leaves without taking them apart
            gc.unfreeze()  # what stays frozen to its end, libraries such as Triton tell of as leaked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three operations; answered here they cost a tenth
        if func in _RANGES:  # names for a profiler, without tensors
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if _wraps(kind):
                return NotImplemented  # then the wrapper runs it on the tensors within, and those operations come here
        kwargs = kwargs or {}
        if self._history is not None:
            self._history.begin(func)
        in_place = self._in_place.is_in_place(func, args)
        if in_place and self._history is not None:
            func = WRITING[func]
            result = func(*args, **kwargs)
        elif in_place:
            result = self._run(func, args, kwargs)
            self._take_over(result, args[0])
        else:
            try:
                result = self._run(func, args, kwargs)
            except Exception:
                self.broke_in = self.broke_in or self.caller
                raise
            rule = None if self._scratch is None or self._paused else self._scratch(func)
            if rule is not None:
                rule(args, kwargs, result, lambda results: self._see_all(results, func), self._workspace(func))
            self._see_all(result, func)
        if func is _PIN or kwargs.get("pin_memory") or _is_pinned_copy(func, args, kwargs, result):
            self._tracks[HOST].pin(result.untyped_storage())
        if not self._paused and self._phases:
            self._costs.add(len(self._phases) - 1, func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = None if self._known is None else self._known(func, args, kwargs)
        return func(*args, **kwargs) if found is None else found[0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens from here until the next phase begins belongs to `name`.

        Where `backward` follows, what `forward` allocated and still lives is a saved activation.
        """
        if name == "backward" and self._phases and self._phases[-1] == "forward":
            for track in self._tracks.values():
                track.mark_live("saved activation", since=track.starts[-1])
        self._phases.append(name)
        if self._history is not None:
            self._history.start_phase()
        for track in self._tracks.values():
            track.starts.append(len(track.events))
        yield
        gc.collect()

    @property
    def caller(self) -> str | None:
        """The module or the engine's call that runs now."""
        return self._callers[-1][0] if self._callers else None

    def enter_module(self, name: str) -> None:
        """Until `leave_module`, new storages are labelled with this module's name."""
        # A module that runs in the backward pass is a checkpoint recomputing its activations.
        recomputes = bool(self._phases) and self._phases[-1] == "backward"
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
        for tensor in plain(tensors):
            track = self._tracks.get(_device_type(tensor))
            if track is not None:
                self._see(tensor, "unseen")
                track.mark(tensor.untyped_storage(), category)

    def mark_rest(self, category: Category) -> None:
        """What lives now, and nothing explained so far, is of this category."""
        for track in self._tracks.values():
            track.mark_live(category)

    def timeline(self) -> Timeline:
        """What was recorded of the device so far, and what its operators and collectives did; of a card, at its end."""
        if self._history is not None:
            return self._history.timeline(self._phases, self._tracks[self._device_type].blocks(), self._costs)
        return self._timeline(self._tracks[self._device_type], self._costs)

    def peaks(self) -> Sequence[int]:
        """Torch's own peak of allocated bytes on a card, phase by phase; known once `timeline` was asked for."""
        return [] if self._history is None else self._history.peaks

    @property
    def peak_reserved_bytes(self) -> int:
        """Torch's own peak of reserved bytes on a card, likewise."""
        return 0 if self._history is None else self._history.peak_reserved_bytes

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """Torch's own memory snapshot, likewise, where `stacks` were asked for."""
        return None if self._history is None else self._history.snapshot

    def host_timeline(self) -> Timeline:
        """What was recorded of the host so far; the same as the device's where the device is the CPU."""
        return self._timeline(self._tracks[HOST], Costs(HOST))

    def _timeline(self, track: Track, costs: Costs) -> Timeline:
        stops = [*track.starts[1:], len(track.events)]
        spans = tuple(
            Span(name, start, stop) for name, start, stop in zip(self._phases, track.starts, stops, strict=True)
        )
        return Timeline(track.blocks(), tuple(track.events), spans, costs.collectives(), costs.operators())

    def _workspace(self, func: Any) -> Seen:
        track = self._tracks[self._device_type]
        return lambda tensor: track.see(tensor.untyped_storage(), "workspace", func)

    def _see_all(self, result: Any, func: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._see(result, func)
        elif isinstance(result, list | tuple):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._see(item, func)

    def _see(self, tensor: torch.Tensor, source: Any) -> None:
        if self._paused or _wraps(tensor.__class__):
            return
        track = self._tracks.get(_device_type(tensor))
        if track is not None:
            label, category = self._callers[-1] if self._callers else (None, None)
            track.see(tensor.untyped_storage(), category, label or source)

    def _take_over(self, result: torch.Tensor, operand: torch.Tensor) -> None:
        """`result` stands in the block of `operand`."""
        track = self._tracks.get(_device_type(result))
        if track is not None:
            track.take_over(result.untyped_storage(), operand.untyped_storage())

    @contextmanager
    def _watching_resize(self) -> Iterator[None]:
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = original(storage, size)
            for track in self._tracks.values():
                track.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original

    @contextmanager
    def _passing_over_propagation(self) -> Iterator[None]:
        """DTensor finds the shapes of a result by running the operation on fake tensors of the global shape."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate(propagator: ShardingPropagator, op_schema: Any) -> Any:
            self._paused, before = True, self._paused
            try:
                return original(propagator, op_schema)
            finally:
                self._paused = before

        ShardingPropagator._propagate_tensor_meta_non_cached = propagate
        try:
            yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = original


def _is_pinned_copy(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether torch put the result into page-locked memory, as it does for copies to the host that nobody waits for.

    Source: `_to_copy` in aten/src/ATen/native/TensorConversions.cpp.
    """
    return bool(func is _TO and kwargs.get("non_blocking") and args[0].is_cuda and _device_type(result) == HOST)


@functools.cache
def _wraps(kind: Any) -> bool:
    """Whether tensors of this type have no memory but that of tensors within: DTensor, torchao's quantised state."""
    return is_traceable_wrapper_subclass_type(kind)


def plain(tensors: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own that these consist of."""
    for tensor in tensors:
        if tensor is not None and _wraps(tensor.__class__):
            within = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
            yield from plain(filter(torch.is_tensor, within))  # a DTensor names its mesh, too
        elif tensor is not None:
            yield tensor


def _device_type(tensor: torch.Tensor) -> str:
    # Asking a fake tensor for its `device` is an operation, that runs through every mode.
    return tensor.fake_device.type if isinstance(tensor, FakeTensor) else tensor.device.type
