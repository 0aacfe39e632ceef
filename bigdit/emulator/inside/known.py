"""Which tensors have known values: those that were computed from known values, or came from the CPU.

Their memory, at the GPU's addresses, is in this process. The CPU reads and writes it there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

LIMIT_BYTES = 64 << 10
"""Tensors up to this size are computed, as in bigdit.emulator.launch."""

MASK_BYTES = 1 << 20
"""Known numbers with fractions are copied up to this size: a mask of 512 texts of 1,024 tokens."""

INTEGER_BYTES = 16 << 20
"""Known integers are copied, and computed from known values, up to this size: the experts of 2 million tokens."""


class Known:
    """The addresses of storages with known values: values that were computed from known values.

    Raises RuntimeError for a torch whose storages have another layout.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._known: set[int] = set()
        self._address_of = torch._C._storage_address
        self._cpu = torch.device("cpu")
        self._memory = torch._C._construct_storage_from_data_pointer(_FIRST, self._cpu, _LAST - _FIRST)
        self._as: dict[Any, Any] = {}  # all memory as a tensor of each dtype
        self._random = torch.Generator("cpu")
        self._random.manual_seed(0)
        for count in (3, 5000):
            probe = torch.empty(count, dtype=torch.uint8)
            if self._of(probe) != (probe.data_ptr(), count):
                raise RuntimeError(f"the layout of storages in torch {torch.__version__} is not that of 2.11 to 2.15")

    def small(self, tensor: Any) -> bool:
        """Whether its whole storage is small: large storages are never computed, nor views of them.

        In CPU memory, the tensor's own size counts. Sparse tensors are not supported.
        """
        if tensor.layout is not self._torch.strided:
            return False
        if not tensor.is_cuda:
            return bool(tensor.numel() * tensor.element_size() <= LIMIT_BYTES)
        return self._of(tensor)[1] <= LIMIT_BYTES

    def readable(self, values: Iterable[Any]) -> bool:
        """Whether each tensor among these values is small, or a known mask."""
        for value in values:
            if isinstance(value, self._torch.Tensor):
                if not self._is_readable(value):
                    return False
            elif isinstance(value, (list, tuple)) and not self.readable(value):
                return False
        return True

    def _is_readable(self, tensor: Any) -> bool:
        if tensor.layout is not self._torch.strided:
            return False
        if not tensor.is_cuda:
            return bool(tensor.nbytes <= _most_bytes(tensor))
        address, nbytes = self._of(tensor)
        return nbytes <= LIMIT_BYTES or (nbytes <= _most_bytes(tensor) and address in self._known)

    def computed(self, result: Any) -> bool:
        """Whether values of an operator's result are computed: integers of a mask's size, too."""
        if self.small(result) or result.layout is not self._torch.strided:
            return self.small(result)
        return not _has_fractions(result) and result.nbytes <= INTEGER_BYTES

    def keeps_a_copy(self, to: Any, source: Any) -> bool:
        """Whether a copy of a known mask, which is not small, is known: from the CPU, or as integers."""
        if not to.is_cuda or (source.is_cuda and _has_fractions(to)):
            return False
        return LIMIT_BYTES < max(self._of(to)[1], source.nbytes) <= _most_bytes(to) and self._is_readable(source)

    def holds(self, tensor: Any) -> bool:
        """Whether the values are known, as those of CPU tensors are."""
        if not tensor.is_cuda:
            return True
        address, nbytes = self._of(tensor)
        return nbytes <= _most_bytes(tensor) and address in self._known

    def whole(self, tensor: Any) -> bool:
        """Whether it is its whole storage, and no view of a part."""
        return bool(tensor.numel() * tensor.element_size() == self._of(tensor)[1])

    def begin(self, tensor: Any) -> None:
        """Make a new GPU tensor unknown, and zero if it is small."""
        if tensor.is_cuda and tensor.layout is self._torch.strided:
            address, nbytes = self._of(tensor)
            self._known.discard(address)
            if nbytes <= LIMIT_BYTES:
                ctypes.memset(address, 0, nbytes)

    def note(self, tensor: Any, known: bool) -> None:
        """Record whether the values of a GPU tensor, which was just written, are known."""
        if tensor.is_cuda:
            (self._known.add if known else self._known.discard)(self._of(tensor)[0])

    def on_host(self, tensor: Any) -> Any:
        """The same memory as a CPU tensor: the GPU's addresses are in this process.

        For a view of a large storage, and for an unknown mask, new zeros.
        """
        if not tensor.numel() or (self._of(tensor)[1] > LIMIT_BYTES and not self.holds(tensor)):
            return self._torch.zeros(tensor.size(), dtype=tensor.dtype, device=self._cpu)
        return self._alias(tensor)

    def _alias(self, tensor: Any) -> Any:
        torch, dtype = self._torch, tensor.dtype
        if dtype not in self._as:
            with torch.utils._python_dispatch._disable_current_modes():
                empty = torch.empty(0, dtype=dtype, device=self._cpu)
                self._as[dtype] = empty.set_(self._memory, 0, ((_LAST - _FIRST) // dtype.itemsize,), (1,))
        start = (tensor.data_ptr() - _FIRST) // dtype.itemsize
        return self._as[dtype].as_strided(tensor.size(), tensor.stride(), start)

    def write(self, tensor: Any, value: Any) -> None:
        """Write the CPU's values into a small tensor."""
        alike = tensor.dtype == value.dtype and tensor.shape == value.shape
        if alike and tensor.is_contiguous() and value.is_contiguous():
            ctypes.memmove(tensor.data_ptr(), value.data_ptr(), value.nbytes)  # less work than copy_
        elif tensor.numel():
            self._alias(tensor).copy_(value)

    def run_on_host(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """The CPU's result of an operator whose arguments are on the GPU."""
        return operator(*map(self._as_host, args), **{key: self._as_host(value) for key, value in kwargs.items()})

    def _as_host(self, value: Any) -> Any:
        torch = self._torch
        if isinstance(value, torch.Tensor):
            return self.on_host(value) if value.is_cuda else value
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._as_host, value))
        if isinstance(value, torch.device):
            return self._cpu
        return self._random if isinstance(value, torch.Generator) else value

    def _of(self, tensor: Any) -> tuple[int, int]:
        """The address and the bytes of a tensor's storage.

        They are read from C++ memory. A Python object of a storage would add a reference for good, and autograd would
        then not add gradients in place (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp).
        """
        words = _Storage.from_address(self._address_of(tensor))
        return words[_ADDRESS], words[_NBYTES]


# The words of c10::StorageImpl: virtual table, reference counts, data address, context, deleter, device, size.
# Source: c10/core/StorageImpl.h, c10/core/Allocator.h, torch 2.11 to 2.15.
_ADDRESS, _NBYTES = 2, 6
_Storage = ctypes.c_uint64 * (_NBYTES + 1)

_FIRST, _LAST = 1 << 12, 1 << 47
"""Addresses that a process may have on x86-64."""


def _has_fractions(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _most_bytes(tensor: Any) -> int:
    return MASK_BYTES if _has_fractions(tensor) else INTEGER_BYTES


def tensors(value: Any) -> Sequence[Any]:
    """The tensors in an argument or a result."""
    if hasattr(value, "untyped_storage"):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [one for each in value for one in tensors(each)]
    return ()
