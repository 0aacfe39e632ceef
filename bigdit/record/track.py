"""The storages of one kind of device, as they come and go."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from bigdit.memory import Block, Category
from bigdit.record.history import History


class Track:
    """Blocks and events of one device type; storages are known by address while they live.

    A category is a guess until `mark` says it: the first mark stays. `history` is shown each block's storage.
    """

    def __init__(self, device_type: str, history: History | None = None) -> None:
        self.device_type = device_type
        self._history = history
        self.events: list[int] = []
        self.starts: list[int] = []
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # storage address -> finaliser, block
        self._nbytes: list[int] = []
        self._category: list[Category | None] = []
        self._label: list[str] = []
        self._pinned: set[int] = set()
        self._marked: set[int] = set()

    def see(self, storage: torch.UntypedStorage, category: Category | None, label: object) -> None:
        """A tensor on this storage exists: allocated now where it was not known, or where its size changed."""
        entry = self._live.get(storage._cdata)
        if entry is None:
            self._allocate(storage, category, str(label))
        elif self._nbytes[entry[1]] != storage.nbytes():
            self._reallocate(storage, entry[1])

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The storage may have another size now: a known one is freed and allocated anew."""
        entry = self._live.get(storage._cdata)
        if entry is not None and self._nbytes[entry[1]] != storage.nbytes():
            self._reallocate(storage, entry[1])

    def take_over(self, storage: torch.UntypedStorage, former: torch.UntypedStorage) -> None:
        """`storage` stands in the block of `former`, which goes unrecorded from here."""
        _, block = self._live.pop(former._cdata)
        self._live[storage._cdata] = (weakref.ref(storage, self._freed(storage._cdata)), block)

    def mark(self, storage: torch.UntypedStorage, category: Category) -> None:
        """The block of this storage is of this category, from its allocation on."""
        entry = self._live.get(storage._cdata)
        if entry is not None and entry[1] not in self._marked:
            self._marked.add(entry[1])
            self._category[entry[1]] = category

    def pin(self, storage: torch.UntypedStorage) -> None:
        """The block of this storage is page-locked host memory."""
        entry = self._live.get(storage._cdata)
        if entry is not None:
            self._pinned.add(entry[1])

    def mark_live(self, category: Category, since: int = 0) -> None:
        """What was allocated since that event, still lives and has no category is of this one."""
        new = {event - 1 for event in self.events[since:] if event > 0}
        for _, block in self._live.values():
            if block in new and self._category[block] is None:
                self._category[block] = category

    def blocks(self) -> tuple[Block, ...]:
        """All blocks so far. What nothing explains is temporary."""
        columns = zip(self._nbytes, self._category, self._label, strict=True)
        return tuple(
            Block(nbytes, category or "temporary", label, i in self._pinned)
            for i, (nbytes, category, label) in enumerate(columns)
        )

    def _allocate(self, storage: torch.UntypedStorage, category: Category | None, label: str) -> None:
        address, block = storage._cdata, len(self._nbytes)
        self._nbytes.append(storage.nbytes())
        self._category.append(category)
        self._label.append(label)
        self.events.append(block + 1)
        if self._history is not None:
            self._history.see(storage)
        self._live[address] = (weakref.ref(storage, self._freed(address)), block)

    def _freed(self, address: int) -> Callable[[object], None]:
        def free(_: object) -> None:
            self.events.append(-(self._live.pop(address)[1] + 1))

        return free

    def _reallocate(self, storage: torch.UntypedStorage, block: int) -> None:
        self.events.append(-(block + 1))
        self._allocate(storage, self._category[block], self._label[block])
        if block in self._marked:
            self._marked.add(len(self._nbytes) - 1)
