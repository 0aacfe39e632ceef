"""Which small tensors of the card hold what their operators computed, and what is done where others are read.

Known ones have their memory as the CPU sees it. Operators that hand values to the host are told of: a read of what was
never computed is noticed, and is zero.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

from . import notices

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


class Reads:
    """What stands instead of the kernels whose host code waits for values."""

    def __init__(self, torch: Any, known: Known) -> None:
        self._torch = torch
        self._known = known

    def instead_of(self, operator: Any, kernel: Any) -> Callable[..., Any] | None:
        """The function that takes this kernel's place; None for an operator that reads nothing."""
        aten = self._torch.ops.aten
        if operator is aten._local_scalar_dense.default:
            return functools.partial(self._scalar, kernel)
        if operator is aten.equal.default:
            return self._equal
        name = operator._schema.name
        if name in _SIZED_BY_VALUES or (name.startswith(_SOLVED) and name not in _NOT_SOLVED):
            return self._on_host(operator, kernel)
        return None

    def _scalar(self, kernel: Any, keys: Any, tensor: Any) -> Any:
        kernel.call_boxed(keys, tensor)  # its copy and its wait are real; what it read is not
        if self._known.holds(tensor):
            return self._known.on_host(tensor).item()
        if tensor.dtype == self._torch.bool:  # such as whether a loss is finite: scripts end where it is not
            notices.add("a condition was read of values that no kernel computed: they are 0")
            return self._known.on_host(tensor).item()
        notices.add("a value was read that no kernel computed: it is 0")
        return self._torch.zeros((), dtype=tensor.dtype).item()

    def _equal(self, keys: Any, one: Any, other: Any) -> bool:
        if not (self._known.holds(one) and self._known.holds(other)):
            notices.add("two tensors were compared that no kernel computed: they are taken to be equal")
            return bool(one.size() == other.size())
        return bool(self._torch.equal(self._known.on_host(one), self._known.on_host(other)))

    def _on_host(self, operator: Any, kernel: Any) -> Callable[..., Any]:
        """Compute where values decide how large the results are; of unknown values nothing is found."""

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, self._torch.Tensor)]
            device = next(tensor.device for tensor in tensors if tensor.is_cuda)
            known = all(self._known.holds(tensor) for tensor in tensors)
            if not known:
                name = operator._schema.name.removeprefix("aten::")
                notices.add(f"{name} looked into values that no kernel computed: they are 0")
            found = operator(*map(self._seen, args), **{key: self._seen(value) for key, value in kwargs.items()})
            return self._to_card(found, device, known)

        return run

    def _seen(self, value: Any) -> Any:
        return self._known.on_host(value) if isinstance(value, self._torch.Tensor) and value.is_cuda else value

    def _to_card(self, found: Any, device: Any, known: bool) -> Any:
        if isinstance(found, self._torch.Tensor):
            moved = found.to(device)
            self._known.note(moved, known)
            return moved
        if isinstance(found, (list, tuple)):
            return type(found)(self._to_card(one, device, known) for one in found)
        return found


_SIZED_BY_VALUES = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
    "aten::bincount",
}

_SOLVED = (
    "aten::linalg_",
    "aten::_linalg_",
    "aten::cholesky",
    "aten::lu_",
    "aten::geqrf",
    "aten::ormqr",
    "aten::triangular_solve",
)
"""cuSOLVER's, whose workspaces it alone knows: small ones are solved on the host."""

_NOT_SOLVED = {"aten::linalg_vector_norm", "aten::linalg_cross"}
"""Of that name, and plain kernels."""
