"""Operators that hand values to the host: a read of what was never computed is noticed, and is zero."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import notices
from .known import Known


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
