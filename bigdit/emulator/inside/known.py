"""Which small tensors of the card hold what their operators computed, and their memory as the CPU sees it."""

from __future__ import annotations

from typing import Any

LIMIT_BYTES = 64 << 10
"""Tensors up to this size are computed; as in bigdit.emulator.card."""


class Known:
    """Storages by address: those whose values were computed from values that were known."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._known: set[int] = set()
        self._storage = torch._C._construct_storage_from_data_pointer
        self._cpu = torch.device("cpu")

    def small(self, tensor: Any) -> bool:
        """Whether all of its storage is: a small view into a large one is part of what is never computed.

        On the host the tensor itself counts: its values are there. Sparse tensors have none that could be seen.
        """
        if tensor.layout is not self._torch.strided:
            return False
        if not tensor.is_cuda:
            return bool(tensor.numel() * tensor.element_size() <= LIMIT_BYTES)
        return bool(tensor.untyped_storage().nbytes() <= LIMIT_BYTES)

    def holds(self, tensor: Any) -> bool:
        """Whether the values are known; those of the host are."""
        return not tensor.is_cuda or tensor.untyped_storage().data_ptr() in self._known

    def whole(self, tensor: Any) -> bool:
        """Whether it is all of its storage, and not a view of a part."""
        return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())

    def note(self, tensor: Any, known: bool) -> None:
        """Say of a tensor on the card that was just written whether its values are known."""
        if tensor.is_cuda:
            (self._known.add if known else self._known.discard)(tensor.untyped_storage().data_ptr())

    def on_host(self, tensor: Any) -> Any:
        """The same elements as a tensor of the CPU: the card's addresses are this process's own.

        A view into what is never computed is zeros of its own.
        """
        torch = self._torch
        storage = tensor.untyped_storage()
        if storage.nbytes() > LIMIT_BYTES or not storage.nbytes():
            return torch.zeros(tensor.size(), dtype=tensor.dtype, device=self._cpu)
        alias = self._storage(storage.data_ptr(), self._cpu, storage.nbytes())
        seen = torch.empty(0, dtype=tensor.dtype, device=self._cpu)
        return seen.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())
