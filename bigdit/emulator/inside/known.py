"""Which small tensors of the card hold what their operators computed, and their memory as the CPU sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

LIMIT_BYTES = 64 << 10
"""Tensors up to this size are computed; as in bigdit.emulator.launch."""


class Known:
    """Storages by address: those whose values were computed from values that were known."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._known: set[int] = set()
        self._storage = torch._C._construct_storage_from_data_pointer
        self._cpu = torch.device("cpu")
        _check_layout(torch)

    def small(self, tensor: Any) -> bool:
        """Whether all of its storage is: a small view into a large one is part of what is never computed.

        On the host the tensor itself counts: its values are there. Sparse tensors have none that could be seen.
        """
        if tensor.layout is not self._torch.strided:
            return False
        if not tensor.is_cuda:
            return bool(tensor.numel() * tensor.element_size() <= LIMIT_BYTES)
        return self._of(tensor)[1] <= LIMIT_BYTES

    def holds(self, tensor: Any) -> bool:
        """Whether the values are known; those of the host are."""
        return not tensor.is_cuda or self._of(tensor)[0] in self._known

    def whole(self, tensor: Any) -> bool:
        """Whether it is all of its storage, and not a view of a part."""
        return bool(tensor.numel() * tensor.element_size() == self._of(tensor)[1])

    def note(self, tensor: Any, known: bool) -> None:
        """Say of a tensor on the card that was just written whether its values are known."""
        if tensor.is_cuda:
            (self._known.add if known else self._known.discard)(self._of(tensor)[0])

    def on_host(self, tensor: Any) -> Any:
        """The same elements as a tensor of the CPU: the card's addresses are this process's own.

        A view into what is never computed is zeros of its own.
        """
        torch = self._torch
        address, nbytes = self._of(tensor)
        if nbytes > LIMIT_BYTES or not nbytes:
            return torch.zeros(tensor.size(), dtype=tensor.dtype, device=self._cpu)
        alias = self._storage(address, self._cpu, nbytes)
        seen = torch.empty(0, dtype=tensor.dtype, device=self._cpu)
        return seen.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _of(self, tensor: Any) -> tuple[int, int]:
        """The address and the bytes of a tensor's storage.

        They are read where C++ keeps them: a storage that Python has an object of counts one holder more, for good, and
        autograd then adds no gradient into it (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp).
        """
        return _fields(self._torch, tensor)


# Of c10::StorageImpl, in words: a table of functions, the counts of references, the data's address, its context and
# deleter, its device, its size. Source: c10/core/StorageImpl.h, c10/core/Allocator.h, torch 2.11 to 2.15.
_ADDRESS, _NBYTES = 2, 6


def _fields(torch: Any, tensor: Any) -> tuple[int, int]:
    words = (ctypes.c_uint64 * (_NBYTES + 1)).from_address(torch._C._storage_address(tensor))
    return words[_ADDRESS], words[_NBYTES]


def _check_layout(torch: Any) -> None:
    """Raises RuntimeError for a torch whose storages are laid out otherwise."""
    for count in (3, 5000):
        probe = torch.empty(count, dtype=torch.uint8)
        if _fields(torch, probe) != (probe.data_ptr(), count):
            raise RuntimeError(f"torch {torch.__version__} lays storages out otherwise than is known of 2.11 to 2.15")


def tensors(value: Any) -> Iterator[Any]:
    """The tensors in an argument or a result."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
