"""Values of small tensors: operators on at most 64 KiB are computed by the CPU, in the card's own memory.

Timesteps, masks, norms, flags and the checks of engines are then right; what comes of larger tensors is zero, and is
known to be unknown. The operators' CUDA kernels are wrapped where the dispatcher has them, below autograd: no mode is
active, which would keep autograd from summing gradients in place and so change what is allocated.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from . import exchanged
from .known import Known, Reads, tensors
from .libraries import library

_LEFT = (
    "record_stream",
    "set_",
    "resize_",
    "_pin_memory",
    "pin_memory",
    "is_pinned",
    "_assert_async",
    "_sparse",
    "_cudnn",
)
"""How operators begin that neither compute nor read values."""

_NUMBERS_ON_THE_CARD = ("aten::pow.Tensor_Tensor_out",)
"""Operators that others call with a number that is a tensor of the card, which no function of Python can be handed: the
values are computed by their callers, `pow.Scalar` here. Source: pow_Scalar_out in aten/src/ATen/native/Pow.cpp."""

_BEYOND_CUDA = ("aten::copy_",)
"""Operators that torch implements for all devices at once, and that compute."""

_OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
"""Operators in place whose result does not depend on what was there."""

_NUMBERS = (bool, int, float, complex)

_installed: list[Kernels] = []
"""What was registered stays as long as the library that registered it."""


def install(torch: Any) -> None:
    """Wrap the kernels of this torch, but with BIGDIT_EMULATED_VALUES=0: what is read is then what lay in memory, or
    zero where the card is told to keep no values.

    Raises AttributeError for a torch that does not hand out its kernels.
    """
    if os.environ.get("BIGDIT_EMULATED_VALUES") == "0":
        return
    kernels = Kernels(torch)
    _installed.append(kernels)
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that take another's place
        for name in [*(name for name in names if name.startswith("aten::")), *_BEYOND_CUDA]:
            kernels.wrap(name)
    exchanged.install(torch, kernels.known)


def leave() -> None:
    """Take the wrappers off, for good: what the host reads of the card is zero from now on, and steps take a third of
    the time."""
    exchanged.leave()
    for kernels in _installed:
        kernels.leave()
    library("libcuda").card_leave_values()


class Kernels:
    """The kernels of one torch, each followed by what it would have computed where that is little.

    `known`: which tensors hold what was computed.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._library = torch.library.Library("aten", "IMPL")
        self.known = Known(torch)
        self._reads = Reads(torch, self.known)
        self._random = torch.Generator("cpu")
        self._random.manual_seed(0)
        self._without_cpu: set[Any] = set()

    def wrap(self, name: str) -> None:
        base, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(self._torch.ops.aten, base), overload or "default")
        if operator.is_view or base.startswith(_LEFT) or name in _NUMBERS_ON_THE_CARD:
            return
        kernel = self._torch.library.get_kernel(name, "CUDA")
        function = self._reads.instead_of(operator, kernel)
        if function is None:
            make = self._emptying if "empty" in base else self._copying if base == "copy_" else self._computing
            function = make(operator, kernel)
        self._library.impl(name.removeprefix("aten::"), function, "CUDA", with_keyset=True, allow_override=True)

    def leave(self) -> None:
        """Only what is brought to the card in another dtype is looked at from now on."""
        self._library._destroy()
        self._library = self._torch.library.Library("aten", "IMPL")
        kernel = self._torch.library.get_kernel("aten::copy_", "CUDA")

        def run(keys: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
            return kernel.call_boxed(keys, to, self._brought(to, source), non_blocking)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._library.impl("copy_", run, "CUDA", with_keyset=True, allow_override=True)

    def _emptying(self, operator: Any, kernel: Any) -> Callable[..., Any]:
        """The kernel of an operator that only takes memory: small tensors begin as zeros, whatever lay there before."""

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            tensor = kernel.call_boxed(keys, *args, **kwargs)
            self._leave([tensor], [])
            return tensor

        return run

    def _copying(self, operator: Any, kernel: Any) -> Callable[..., Any]:
        computing = self._computing(operator, kernel)

        def run(keys: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
            return computing(keys, to, self._brought(to, source), non_blocking)

        return run

    def _brought(self, to: Any, source: Any) -> Any:
        """What is brought to the card in another dtype is converted on the host: for gigabytes that is many seconds, of
        values that are never written to the card. Memory is taken as that does, and nothing is converted."""
        if not to.is_cuda or source.device.type != "cpu" or source.dtype == to.dtype or source.shape != to.shape:
            return source
        small = self.known.small(to) or self.known.small(source)
        return source if small else self._torch.empty_like(source, dtype=to.dtype)

    def _computing(self, operator: Any, kernel: Any) -> Callable[..., Any]:
        """The kernel, and then the values of its results where all tensors are small."""
        arguments = operator._schema.arguments
        written = [(i, one.name) for i, one in enumerate(arguments) if one.alias_info and one.alias_info.is_write]
        places = [i for i, one in enumerate(arguments) if str(one.type) == "Tensor"]
        fresh_start = operator._schema.overload_name.endswith("out") or operator._schema.name[6:] in _OVERWRITE

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            args = self._with_tensors(args, places)
            results = kernel.call_boxed(keys, *args, **kwargs)
            mutated = [t for i, name in written for t in tensors(args[i] if i < len(args) else kwargs.get(name))]
            fresh = [] if written else list(tensors(results))
            touched = [*tensors(args), *tensors(list(kwargs.values()))]
            if operator not in self._without_cpu and all(map(self.known.small, touched + fresh)):
                read = [t for t in touched if not any(t is one for one in mutated)] if fresh_start else touched
                self._compute(operator, args, kwargs, read, mutated, fresh)
            else:
                self._leave(fresh, mutated)
            return results

        return run

    def _with_tensors(self, args: tuple[Any, ...], places: list[int]) -> tuple[Any, ...]:
        """The arguments with numbers as tensors again, of the result's dtype: so they were before they came here."""
        if not any(i < len(args) and isinstance(args[i], _NUMBERS) for i in places):
            return args
        torch, found = self._torch, list(args)
        other = next((one for one in args if isinstance(one, torch.Tensor)), torch.tensor(0))
        for i in places:
            if i < len(args) and isinstance(args[i], _NUMBERS):
                exact = torch.tensor(args[i], dtype=torch.float64 if isinstance(args[i], float) else None)
                found[i] = exact.to(torch.result_type(other, args[i]))  # an integer too large wraps, as in kernels
        return tuple(found)

    def _compute(
        self, operator: Any, args: Any, kwargs: Any, read: list[Any], mutated: list[Any], fresh: list[Any]
    ) -> None:
        known = all(map(self.known.holds, read))
        try:
            computed = operator(*map(self._seen, args), **{key: self._seen(value) for key, value in kwargs.items()})
        except (NotImplementedError, RuntimeError, TypeError, IndexError) as why:
            # The CPU has no such kernel, or not for these arguments: the result is not known, and a read of it is said.
            if isinstance(why, NotImplementedError):
                self._without_cpu.add(operator)
            self._leave(fresh, mutated)
            return
        for result, value in zip(fresh, tensors(computed), strict=False):
            if result.numel():
                self.known.on_host(result).copy_(value)
            self.known.note(result, known)
        for tensor in mutated:
            self.known.note(tensor, known and (self.known.holds(tensor) or self.known.whole(tensor)))

    def _leave(self, fresh: Iterable[Any], mutated: Iterable[Any]) -> None:
        """Small results of what is not computed are zero, and not known; what was known of a small one stays there."""
        for tensor in fresh:
            if tensor.is_cuda and self.known.small(tensor):
                self.known.on_host(tensor).zero_()
                self.known.note(tensor, False)
        for tensor in mutated:
            if tensor.is_cuda and self.known.small(tensor):
                if not self.known.holds(tensor):
                    self.known.on_host(tensor).zero_()
                self.known.note(tensor, False)

    def _seen(self, value: Any) -> Any:
        """An argument as the CPU's operator takes it."""
        torch = self._torch
        if isinstance(value, torch.Tensor):
            return self.known.on_host(value) if value.is_cuda else value
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._seen, value))
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return self._random
        return value
