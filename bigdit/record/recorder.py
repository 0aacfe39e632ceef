"""Record every storage that torch allocates and frees on one kind of device: fake, or real."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from bigdit.memory import Block, Category, Span, Timeline
from bigdit.record.in_place import InPlace

_GUESSED = (None, "saved activation", "recomputed activation")


class Recorder(TorchDispatchMode):
    """The storages of `device_type` seen under this mode, as a Timeline of allocations and frees.

    A storage is new when an operation returns a tensor on it for the first time; views share it. It is freed
    when its finaliser runs. FSDP2 frees by resizing a storage to nothing, which no operation and no finaliser
    sees: `UntypedStorage.resize_` is hooked while the mode is on. What a kernel takes and gives back inside
    one operation is not seen. Of a DTensor it sees the local tensor and what is done with it.

    Frees follow reference counts. A cycle would live until the garbage collector happens to run, which no two
    runs agree on: automatic collection is off while the mode is on, and a full one closes each phase.

    Use as a context manager, inside FakeTensorMode where the tensors are fake.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # storage address -> finaliser, block
        self._nbytes: list[int] = []
        self._category: list[Category | None] = []
        self._label: list[str] = []
        self._events: list[int] = []
        self._starts: list[tuple[str, int]] = []
        self._modules: list[str] = []
        self._in_place = InPlace()
        self._hooks = ExitStack()
        self._collect = False
        self._paused = False

    def __enter__(self) -> Recorder:
        self._collect = gc.isenabled()
        gc.collect()
        gc.freeze()  # what exists by now is not this recording's garbage: collections stay cheap
        gc.disable()
        self._hooks.enter_context(self._in_place.watching())
        self._hooks.enter_context(self._watching_resize())
        self._hooks.enter_context(self._passing_over_propagation())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        gc.unfreeze()
        if self._collect:
            gc.enable()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then DTensor runs it on the local tensors, and those operations come here
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three operations; answered here they cost a tenth
        if self._in_place.is_in_place(func, args):
            return self._take_over(func(*args), args[0])
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._see(result, func)
        elif isinstance(result, list | tuple):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._see(item, func)
        return result

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens from here until the next phase begins belongs to `name`.

        Where `backward` follows, what `forward` allocated and still lives is a saved activation.
        """
        if name == "backward":
            self._mark_saved_activations()
        self._starts.append((name, len(self._events)))
        yield
        gc.collect()

    def enter_module(self, name: str) -> None:
        """Until `leave_module`, new storages are labelled with this module's name."""
        self._modules.append(name)

    def leave_module(self) -> None:
        self._modules.pop()

    def mark(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None:
        """The storages of `tensors` are of this category, from their allocation on.

        The first mark stays. A storage that was allocated unseen (numpy's, or from before the recording) is
        allocated here and now.
        """
        for tensor in map(_local, tensors):
            if tensor is None or _device_type(tensor) != self._device_type:
                continue
            self._see(tensor, "unseen")
            entry = self._live.get(tensor.untyped_storage()._cdata)
            if entry and self._category[entry[1]] in _GUESSED:
                self._category[entry[1]] = category

    def timeline(self) -> Timeline:
        """What was recorded so far. What no mark and no phase explains is temporary."""
        blocks = tuple(
            Block(nbytes, category or "temporary", label)
            for nbytes, category, label in zip(self._nbytes, self._category, self._label, strict=True)
        )
        stops = [start for _, start in self._starts[1:]] + [len(self._events)]
        spans = tuple(Span(name, start, stop) for (name, start), stop in zip(self._starts, stops, strict=True))
        return Timeline(blocks, tuple(self._events), spans)

    def _see(self, tensor: torch.Tensor, source: Any) -> None:
        if self._paused or _device_type(tensor) != self._device_type:
            return
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is None:
            label = self._modules[-1] if self._modules else str(source)
            # A module that runs in the backward pass is a checkpoint recomputing its activations.
            recomputed = bool(self._modules) and self._starts[-1][0] == "backward"
            self._allocate(storage, storage.nbytes(), "recomputed activation" if recomputed else None, label)
        elif self._nbytes[entry[1]] != storage.nbytes():
            self._reallocate(storage, entry[1])

    def _allocate(self, storage: torch.UntypedStorage, nbytes: int, category: Category | None, label: str) -> None:
        address, block = storage._cdata, len(self._nbytes)
        self._nbytes.append(nbytes)
        self._category.append(category)
        self._label.append(label)
        self._events.append(block + 1)
        self._live[address] = (weakref.ref(storage, self._freed(address)), block)

    def _take_over(self, result: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
        """`result` stands in the block of `operand`, which goes unrecorded from here."""
        if _device_type(result) == self._device_type:
            storage = result.untyped_storage()
            _, block = self._live.pop(operand.untyped_storage()._cdata)
            self._live[storage._cdata] = (weakref.ref(storage, self._freed(storage._cdata)), block)
        return result

    def _freed(self, address: int) -> Callable[[object], None]:
        def free(_: object) -> None:
            self._events.append(-(self._live.pop(address)[1] + 1))

        return free

    def _reallocate(self, storage: torch.UntypedStorage, block: int) -> None:
        self._events.append(-(block + 1))
        self._allocate(storage, storage.nbytes(), self._category[block], self._label[block])

    @contextmanager
    def _watching_resize(self) -> Iterator[None]:
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = original(storage, size)
            entry = self._live.get(storage._cdata)
            if entry is not None and self._nbytes[entry[1]] != storage.nbytes():
                self._reallocate(storage, entry[1])
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

    def _mark_saved_activations(self) -> None:
        if not self._starts or self._starts[-1][0] != "forward":
            return
        new = {event - 1 for event in self._events[self._starts[-1][1] :] if event > 0}
        for _, block in self._live.values():
            if block in new and self._category[block] is None:
                self._category[block] = "saved activation"


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _device_type(tensor: torch.Tensor) -> str:
    # Asking a fake tensor for its `device` is an operation, that runs through every mode.
    return tensor.fake_device.type if isinstance(tensor, FakeTensor) else tensor.device.type
