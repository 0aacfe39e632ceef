"""Values of small tensors: operators on at most 64 KiB are computed by the CPU, in the GPU's own memory.

So timesteps, norms, flags and the checks of engines are right. Masks of many texts are larger: up to 1 MiB, what comes
from the CPU is right too; and integers, with those that follow from them, up to 16 MiB. Results of larger tensors are
zero, and known to be unknown. Of unknown values, topk chooses each index as often as all others. The operators' CUDA
kernels are wrapped in the dispatcher, below autograd. A dispatch mode would keep autograd from summing gradients in
place, and so change what is allocated.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import notices
from .known import INTEGER_BYTES, MASK_BYTES, Known, tensors
from .libraries import library

_NOT_WRAPPED = (
    "record_stream",
    "set_",
    "resize_",
    "_pin_memory",
    "pin_memory",
    "is_pinned",
    "_assert_async",
    "_efficientzerotensor",
    "_sparse",
    "_cudnn",
)
"""Prefixes of operators that neither compute nor read values."""

_NUMBERS_ON_THE_GPU = ("aten::pow.Tensor_Tensor_out",)
"""Operators that others call with a number as a tensor of the GPU, which Python functions cannot receive. Their callers
compute the values: here `pow.Scalar`. Source: pow_Scalar_out in aten/src/ATen/native/Pow.cpp."""

_BEYOND_CUDA = ("aten::copy_",)
"""Computing operators that torch implements for all devices at once."""

_OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
"""In-place operators whose result does not depend on earlier values."""

_NUMBERS = (bool, int, float, complex)

_installed: list[Kernels] = []
"""A registration lives as long as its library object."""


def install(torch: Any) -> None:
    """Wrap the kernels of this torch, unless BIGDIT_EMULATED_VALUES=0.

    Raises AttributeError for a torch that does not give access to its kernels.
    """
    if os.environ.get("BIGDIT_EMULATED_VALUES") == "0":
        return
    kernels = Kernels(torch)
    _installed.append(kernels)
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about replaced kernels
        for name in [*(name for name in names if name.startswith("aten::")), *_BEYOND_CUDA]:
            kernels.wrap(name)
    _install_exchange(torch, kernels.known)


def leave() -> None:
    """Remove the wrappers for good. From now on all reads of the GPU are zero, and steps take a third of the time."""
    for registered in _exchanging:
        registered._destroy()
    for kernels in _installed:
        kernels.leave()
    library("libcuda").gpu_leave_values()


def unknown(written: list[Any]) -> None:
    """These tensors were written by a kernel that computes nothing: small ones are zero, and known to be unknown."""
    for kernels in _installed:
        if not kernels.left:
            with kernels._torch.utils._python_dispatch._disable_current_modes():  # which count what a script calls
                for tensor in written:
                    if tensor.is_cuda and kernels.known.small(tensor):
                        kernels.known.on_host(tensor).zero_()
                    kernels.known.note(tensor, False)


class Kernels:
    """Wraps the kernels of a torch: after each, its values are computed if all tensors are small.

    `known`: the tensors with computed values. `left`: nothing is computed any more.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._library = torch.library.Library("aten", "IMPL")
        self.known = Known(torch)
        self._reads = Reads(torch, self.known)
        self._numbers: dict[tuple[type, str, Any, Any], Any] = {}
        self.left = False

    def wrap(self, name: str) -> None:
        base, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(self._torch.ops.aten, base), overload or "default")
        if operator.is_view or base.startswith(_NOT_WRAPPED) or name in _NUMBERS_ON_THE_GPU:
            return
        kernel = self._torch.library.get_kernel(name, "CUDA")
        function = self._reads.instead_of(operator, kernel)
        if function is None:
            make = {"copy_": self._wrap_copy, "topk": self._wrap_topk}.get(base, self._wrap_computation)
            function = (self._wrap_empty if "empty" in base else make)(operator, kernel)
        self._library.impl(name.removeprefix("aten::"), function, "CUDA", with_keyset=True, allow_override=True)

    def leave(self) -> None:
        """Remove all wrappers but that of copies to the GPU with another dtype."""
        self.left = True
        self._library._destroy()
        self._library = self._torch.library.Library("aten", "IMPL")
        kernel = self._torch.library.get_kernel("aten::copy_", "CUDA")

        def run(keys: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
            return kernel.call_boxed(keys, to, self._cast(to, source, non_blocking), non_blocking)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._library.impl("copy_", run, "CUDA", with_keyset=True, allow_override=True)

    def _wrap_empty(self, operator: Any, kernel: Any) -> Callable[..., Any]:
        """Wrap an operator that only allocates memory: small tensors begin as zeros."""
        call = kernel.call_boxed

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            tensor = call(keys, *args, **kwargs)
            self.known.begin(tensor)
            return tensor

        return run

    def _wrap_copy(self, operator: Any, kernel: Any) -> Callable[..., Any]:
        computing = self._wrap_computation(operator, kernel)

        def run(keys: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
            source = self._cast(to, source, non_blocking)
            results = computing(keys, to, source, non_blocking)
            if self.known.keeps_a_copy(to, source):
                self.known.write(to, self.known.on_host(source) if source.is_cuda else source)
                self.known.note(to, self.known.whole(to) or self.known.holds(to))
            return results

        return run

    def _wrap_topk(self, operator: Any, kernel: Any) -> Callable[..., Any]:
        """Wrap the choice of the largest: of unknown values, each index is chosen as often as all others.

        So routers spread tokens evenly over experts, as their training aims at.
        """
        computing = self._wrap_computation(operator, kernel)

        def run(keys: Any, tensor: Any, k: int, dim: int = -1, *how: Any, **out: Any) -> Any:
            results = computing(keys, tensor, k, dim, *how, **out)
            chosen = results[1]
            if tensor.dim() and not self.known.holds(tensor) and chosen.nbytes <= INTEGER_BYTES:
                notices.add("topk chose among values that no kernel computed: each index as often as all others")
                with self._torch.utils._python_dispatch._disable_current_modes():
                    order = self._torch.arange(chosen.numel(), device="cpu") % tensor.shape[dim]
                    rows = order.view(*chosen.movedim(dim, -1).shape).movedim(-1, dim)
                    self.known.write(chosen, rows)
                self.known.note(chosen, True)
            return results

        return run

    def _cast(self, to: Any, source: Any, non_blocking: bool) -> Any:
        """The source of a blocking copy, in the GPU's dtype. torch converts it in CPU memory, which takes seconds for
        gigabytes. Of large tensors only the memory is allocated. It converts others on the GPU."""
        stays = non_blocking or not to.is_cuda or source.device.type != "cpu"
        if stays or source.dtype == to.dtype or source.shape != to.shape:
            return source
        return source if source.nbytes <= MASK_BYTES else self._torch.empty_like(source, dtype=to.dtype)

    def _wrap_computation(self, operator: Any, kernel: Any) -> Callable[..., Any]:
        """Wrap an operator: its kernel runs, and then its values are computed if all tensors are small."""
        arguments = operator._schema.arguments
        written = [(i, one.name) for i, one in enumerate(arguments) if one.alias_info and one.alias_info.is_write]
        places = [i for i, one in enumerate(arguments) if str(one.type) == "Tensor"]
        fresh_start = operator._schema.overload_name.endswith("out") or operator._schema.name[6:] in _OVERWRITE
        # Looked up once: this runs for every operator.
        call, readable, made = kernel.call_boxed, self.known.readable, self.known.computed
        on_cpu = True

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal on_cpu
            for i in places:
                if i < len(args) and isinstance(args[i], _NUMBERS):
                    args = self._with_tensors(args, places)
                    break
            results = call(keys, *args, **kwargs)
            fresh = () if written else tensors(results)
            mutated = [t for i, name in written for t in tensors(args[i] if i < len(args) else kwargs.get(name))]
            if on_cpu and readable(args) and readable(kwargs.values()) and all(map(made, fresh)):
                touched = [*tensors(args), *tensors([*kwargs.values()])] if kwargs else tensors(args)
                read = [t for t in touched if not any(t is one for one in mutated)] if fresh_start else touched
                on_cpu = self._compute(operator, args, kwargs, read, mutated, fresh)
            else:
                self._mark_unknown(fresh, mutated)
            return results

        return run

    def _with_tensors(self, args: tuple[Any, ...], places: list[int]) -> tuple[Any, ...]:
        """The arguments, with numbers turned back into tensors of the result's dtype."""
        torch, found = self._torch, list(args)
        other = next((one.dtype for one in args if isinstance(one, torch.Tensor)), torch.int64)
        for i in places:
            if i < len(args) and isinstance(args[i], _NUMBERS):
                key = type(args[i]), repr(args[i]), other, torch.get_default_dtype()
                if key not in self._numbers:  # kernels write to no number, so each is made once
                    with torch.utils._python_dispatch._disable_current_modes():  # such as one that fakes tensors
                        self._numbers[key] = self._as_tensor(args[i], other)
                found[i] = self._numbers[key]
        return tuple(found)

    def _as_tensor(self, number: Any, other: Any) -> Any:
        torch, cpu = self._torch, self._torch.device("cpu")
        exact = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None, device=cpu)
        dtype = torch.result_type(torch.empty(0, dtype=other, device=cpu), number)
        return exact.to(dtype)  # a too large integer wraps, as in kernels

    def _compute(
        self, operator: Any, args: Any, kwargs: Any, read: Sequence[Any], mutated: list[Any], fresh: Sequence[Any]
    ) -> bool:
        """Compute an operator's values. Returns whether the CPU has a kernel for it."""
        known = all(map(self.known.holds, read))
        try:
            computed = self.known.run_on_host(operator, args, kwargs)
        except (NotImplementedError, RuntimeError, TypeError, IndexError) as why:
            # The CPU has no such kernel, or not for these arguments. The result is unknown, and a read of it is
            # reported.
            self._mark_unknown(fresh, mutated)
            return not isinstance(why, NotImplementedError)
        for result, value in zip(fresh, tensors(computed), strict=False):
            self.known.write(result, value)
            self.known.note(result, known)
        for tensor in mutated:
            self.known.note(tensor, known and (self.known.holds(tensor) or self.known.whole(tensor)))
        return True

    def _mark_unknown(self, fresh: Iterable[Any], mutated: Iterable[Any]) -> None:
        """Make small results zero, and mark them as unknown. A mutated tensor with known values keeps them."""
        for tensor in fresh:
            self.known.begin(tensor)
        for tensor in mutated:
            if tensor.is_cuda:
                if self.known.small(tensor) and not self.known.holds(tensor):
                    self.known.on_host(tensor).zero_()
                self.known.note(tensor, False)


class Reads:
    """Replaces kernels whose host code waits for values."""

    def __init__(self, torch: Any, known: Known) -> None:
        self._torch = torch
        self._known = known

    def instead_of(self, operator: Any, kernel: Any) -> Callable[..., Any] | None:
        """The function that replaces this kernel; None for an operator that reads no values."""
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
        kernel.call_boxed(keys, tensor)  # for its copy and its wait
        if self._known.holds(tensor):
            return self._known.on_host(tensor).item()
        if tensor.dtype == self._torch.bool:  # such as whether a loss is finite; scripts end if it is not
            notices.add("a condition on values that no kernel computed was read: they are 0")
            return self._known.on_host(tensor).item()
        notices.add("a value that no kernel computed was read: it is 0")
        return self._torch.zeros((), dtype=tensor.dtype).item()

    def _equal(self, keys: Any, one: Any, other: Any) -> bool:
        if not (self._known.holds(one) and self._known.holds(other)):
            notices.add("two tensors that no kernel computed were compared: they are assumed to be equal")
            return bool(one.size() == other.size())
        return bool(self._torch.equal(self._known.on_host(one), self._known.on_host(other)))

    def _on_host(self, operator: Any, kernel: Any) -> Callable[..., Any]:
        """Compute on the CPU, if values decide the size of the results. Unknown values are 0."""

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, self._torch.Tensor)]
            device = next(tensor.device for tensor in tensors if tensor.is_cuda)
            known = all(self._known.holds(tensor) for tensor in tensors)
            if not known:
                name = operator._schema.name.removeprefix("aten::")
                notices.add(f"{name} read values that no kernel computed: they are 0")
            return self._to_gpu(self._known.run_on_host(operator, args, kwargs), device, known)

        return run

    def _to_gpu(self, found: Any, device: Any, known: bool) -> Any:
        if isinstance(found, self._torch.Tensor):
            moved = found.to(device)
            self._known.note(moved, known)
            return moved
        if isinstance(found, (list, tuple)):
            return type(found)(self._to_gpu(one, device, known) for one in found)
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
"""Operators of cuSOLVER, whose workspaces only it knows. The CPU solves small ones."""

_NOT_SOLVED = {"aten::linalg_vector_norm", "aten::linalg_cross"}
"""Operators with such names that are plain kernels."""


_FUNCTIONAL = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
)
"""Operators of _c10d_functional, which DTensor calls. torch has one implementation for all devices."""

_RECEIVE = {"broadcast_", "scatter_", "recv_", "recv_any_source_"}
"""Collectives that receive another process's values, which may be known only there."""

_exchanging: list[Any] = []


def _install_exchange(torch: Any, known: Known) -> None:
    """Wrap torch's collectives, which exchange small payloads for real: values from known values are known."""
    if not torch.distributed.is_available():
        return
    names = [n for n in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA") if n.startswith("c10d::")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about replaced kernels
        for name in [*names, *(f"_c10d_functional::{name}" for name in _FUNCTIONAL)]:
            namespace, _, operator = name.partition("::")
            registered = torch.library.Library(namespace, "IMPL")
            _exchanging.append(registered)
            function = _wrap_exchange(torch.library.get_kernel(name, "CUDA"), operator, namespace == "c10d", known)
            registered.impl(operator, function, "CUDA", with_keyset=True, allow_override=True)


def _wrap_exchange(kernel: Any, operator: str, into_first: bool, known: Known) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        first, others = list(tensors(args[0])) if args else [], list(tensors(list(args[1:])))
        came = operator in _RECEIVE or all(map(known.holds, others if into_first and others else first))
        results = kernel.call_boxed(keys, *args, **kwargs)
        for tensor in first if into_first else tensors(results):
            known.note(tensor, came and known.small(tensor))
        return results

    return run
