"""Costs of operators: FLOPs, bytes and collectives, counted under a dispatch mode that keeps sums in place.

Three places in torch's C++ ask whether a tensor is a subclass. Under any TorchDispatchMode the answer is yes for every
tensor. Then they add out of place, with one more tensor each time:

- autograd, where a tensor was used twice, adds the second gradient into the first if nothing else holds that
  (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp);
- `linear` adds the bias into the product where no addmm does both (aten/src/ATen/native/Linear.cpp);
- the gradients of indexing and of topk are written into zeros (index_backward and
  value_selecting_reduction_backward in torch/csrc/autograd/FunctionsManual.cpp).

This mode writes such a sum into its first operand, as torch does without a mode. If the program has its own mode, as
with selective checkpointing, torch really adds out of place.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass_type,
)
from torch.utils.flop_counter import conv_flop_count, flop_registry

from bigdit.memory import Collective, OperatorCost, Place

aten = torch.ops.aten
_ADD = aten.add.Tensor

WRITING = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.index_put.default: aten._index_put_impl_.default,
    aten.scatter.src: aten.scatter_.src,
}
"""Operators, and those that compute the same sum in their first operand."""


@contextmanager
def replaced(owner: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace `owner.name` by `by(owner.name)` within the context."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(by(original)))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def watching_linear() -> Iterator[None]:
    """Within it, a Counting mode knows the operators of `F.linear`. Enter it before compilation, since compiled blocks
    are compiled again when `F.linear` changes."""

    def watched(linear: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            mode = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
            if not isinstance(mode, Counting):
                return linear(*args, **kwargs)
            mode.in_place.in_linear = True
            try:
                return linear(*args, **kwargs)
            finally:
                mode.in_place.in_linear = False

        return called

    with nullcontext() if hasattr(F.linear, "__wrapped__") else replaced(F, "linear", watched):
        yield


class InPlace:
    """Recognises sums that torch without a mode would compute in place. Create it before a mode is entered."""

    def __init__(self) -> None:
        self._uses_of_the_only_holder = _uses_of_the_only_holder()
        self.in_linear = False

    def is_in_place(self, func: Any, args: Any) -> bool:
        """Whether torch without a mode would write this call's sum into its first operand."""
        if func is _ADD:
            return self.in_linear or self._accumulates(*args)
        # The gradient of an indexed assignment writes into a copy, and does not accumulate.
        return _in_engine() and func in WRITING and (func is not aten.index_put.default or args[3:4] == (True,))

    def _accumulates(self, first: torch.Tensor, second: Any) -> bool:
        if not _in_engine() or not isinstance(second, torch.Tensor):
            return False
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        # A view also holds its base, so its storage has two holders.
        return not first._is_view() and first._use_count() == self._uses_of_the_only_holder


def _in_engine() -> bool:
    """Whether autograd's engine computes. It builds no graph, unlike a forward that is recomputed in the backward."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


@functools.cache
def _uses_of_the_only_holder() -> int:
    """The reference count of autograd's own gradient in a dispatch mode, which differs between versions of torch."""
    with torch.enable_grad(), _Uses() as uses:
        x = torch.ones(2, requires_grad=True)
        (x.sin() + x.cos()).sum().backward()
    return uses.count


class _Uses(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.count = args[0]._use_count()
        return func(*args, **(kwargs or {}))


# Without underscores, the dispatcher's names of collectives, in c10d and DTensor's functional ones, start with these
# keys. Others, such as waits and barriers, send nothing.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
}
_NAMESPACES = ("c10d", "_c10d_functional")
COMPILED = "compiled kernel"
"""The name of kernels that torch's compiler makes."""
# Operators that only allocate, or return one number.
_FREE = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.is_pinned,
    aten.record_stream,
    aten._local_scalar_dense,
    aten._unsafe_view,
}
# Operators that do not read what they write.
_OVERWRITE = {aten.copy_, aten._foreach_copy_, aten.fill_, aten.zero_, aten._foreach_zero_, aten.normal_, aten.uniform_}
_COPIES = {aten.copy_, aten._foreach_copy_, aten._to_copy}
# The product with an nf4 weight, by name, since bitsandbytes is imported late. torch's flop counter does not know it.
_PACKED_PRODUCT = "bitsandbytes.gemm_4bit"
_GROUPS = {aten.convolution: 8, aten.convolution_backward: 9}


def _convolution_backward_flops(
    grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *options: Any, **known: Any
) -> int:
    """As many as the forward pass for each requested gradient.

    torch's own formula (conv_backward_flop in torch/utils/flop_counter.py, 2.13) counts the weight's gradient of a
    grouped convolution as that of a dense one: for a depthwise one, as many times too much as it has channels.
    """
    transposed, asked = options[4], options[-1]
    return (asked[0] + asked[1]) * conv_flop_count(input.shape, weight.shape, grad_output.shape, transposed=transposed)


def _of_shapes(formula: Callable[..., int]) -> Callable[..., int]:
    """torch's formula of shapes, for tensors. Each combination of shapes is computed once: torch searches trees for
    tensors, which takes as long as an operation."""
    within = getattr(formula, "__wrapped__", None)
    if within is None:
        return formula  # it takes tensors
    of_shapes = functools.cache(within)

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        named = {name: _shape(value) for name, value in kwargs.items()}
        return int(of_shapes(*map(_shape, args), out_shape=_shape(out_val), **named))

    return flops


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, list | tuple):
        return tuple(_shape(item) for item in value)
    return value


_FORMULAS = {packet: _of_shapes(formula) for packet, formula in flop_registry.items()} | {
    aten.convolution_backward: _convolution_backward_flops
}


class Counting(TorchDispatchMode):  # type: ignore[misc]
    """Counts all operators under this mode in `costs`, for the last of `phases`.

    Of a DTensor, or another wrapper, it sees the operators on the tensors within.
    """

    def __init__(self) -> None:
        super().__init__()
        self.costs = Costs()
        self.phases: list[str] = []
        self.paused = False
        self.in_place = InPlace()
        self._hooks = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in this mode, and skipping the compiler would slow every operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled blocks run as they do without this mode

    def __enter__(self) -> Counting:
        self._hooks.enter_context(watching_linear())
        # DTensor runs the operation on fake tensors of the global shape, to find the shapes of its result.
        self._hooks.enter_context(replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", self._uncounted))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if is_wrapper(kind):
                return NotImplemented  # the wrapper then runs it on the tensors within, in this mode
        kwargs = kwargs or {}
        if self.in_place.is_in_place(func, args):
            func = WRITING[func]
            if func is aten._index_put_impl_.default:  # autograd knows that its indices are valid, and so checks none
                args = (*args, True)
        result = self.run(func, args, kwargs)
        if self.phases and not self.paused:
            self.costs.add(len(self.phases) - 1, func, args, kwargs, result)
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation."""
        return func(*args, **kwargs)

    def count_kernel(self, tensors: list[torch.Tensor], nbytes: int | None) -> None:
        """Count a launch of a compiled kernel that moves `nbytes`; if None, the bytes of its `tensors`."""
        if self.phases and not self.paused:
            moved = sum(each.nbytes for each in tensors) if nbytes is None else nbytes
            self.costs.add_kernel(len(self.phases) - 1, _dtype(tensors[0].dtype), moved)

    def _uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self.paused, before = True, self.paused
            try:
                return function(*args)
            finally:
                self.paused = before

        return called


is_wrapper = functools.cache(is_traceable_wrapper_subclass_type)
"""Whether tensors of this type only have the memory of tensors within: DTensor, torchao's quantised state."""


class Costs:
    """Sums by phase, operator, dtype and place.

    FLOPs follow the formulas of torch.utils.flop_counter (a multiply-add is 2). Bytes are those of each tensor that an
    operator reads or writes, twice if it does both. Names tell grouped convolutions from dense ones, which have other
    kernels, and include the size of attention's heads.
    """

    def __init__(self) -> None:
        # by span, operator, dtype and place
        self._sums: defaultdict[tuple[int, str, str, Place], _Sum] = defaultdict(_Sum)
        self._collectives: list[Collective] = []

    def add(self, span: int, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one call of `func` in the span of that number."""
        counted = _counted(func)
        if counted is None:
            return
        if counted.is_collective:
            self._add_collective(span, func, args, kwargs, result)
            return
        results = _tensors((result,))
        tensors = _tensors(args) + _tensors(kwargs.values()) + results
        if not tensors:
            return
        place = self._place(counted, tensors, results)
        # The dtype of the arithmetic decides its rate.
        found = self._sums[span, counted.name_of(args), _dtype(tensors[0].dtype), place]
        found.calls += 1
        if place in ("to device", "to host"):
            found.nbytes += sum(tensor.nbytes for tensor in results or _tensors(args[:1]))
        else:
            again = _tensors(args[i] for i in counted.written if i < len(args)) if counted.written else ()
            found.nbytes += sum(tensor.nbytes for tensor in {id(each): each for each in tensors}.values())
            found.nbytes += sum(tensor.nbytes for tensor in again)
        if counted.flops is not None:
            found.flops += counted.flops(*args, **kwargs, out_val=result)
        elif counted.is_packed:
            found.flops += 2 * args[0].shape[-1] * results[0].numel()

    def add_kernel(self, span: int, dtype: str, nbytes: int) -> None:
        """Count a compiled kernel of several operators in the span of that number."""
        found = self._sums[span, COMPILED, dtype, "device"]
        found.calls += 1
        found.nbytes += nbytes

    def operators(self) -> tuple[OperatorCost, ...]:
        return tuple(
            OperatorCost(span, operator, dtype, found.calls, found.flops, found.nbytes, place)
            for (span, operator, dtype, place), found in self._sums.items()
        )

    def collectives(self) -> tuple[Collective, ...]:
        """In the order of their calls."""
        return tuple(self._collectives)

    def _add_collective(self, span: int, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        called = func._opname.replace("_", "")
        name = next((name for start, name in _COLLECTIVES.items() if called.startswith(start)), None)
        if any(isinstance(each, list) and len(each) > 1 and sum(map(bool, each)) == 1 for each in args):
            name = "send"  # an exchange with one process
        if name is not None:
            # Of an all-gather the whole result counts, of a reduce-scatter the whole input: the largest tensor it has.
            nbytes = max(tensor.nbytes for tensor in _tensors((args, result)))
            self._collectives.append(Collective(span, name, nbytes, _group_size([*args, *kwargs.values()])))

    def _place(self, counted: _Counted, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> Place:
        on_host = [tensor.is_cpu for tensor in tensors]
        if True not in on_host:
            return "device"
        if False not in on_host:
            return "host"
        if not counted.is_copy:
            return "device"  # a kernel that got a number, or an index, from CPU memory
        # What is written comes last; a list that is copied into comes first, and nothing is returned.
        return "to host" if (on_host[-1] if results else on_host[0]) else "to device"


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    flops: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Counted:
    """The properties of an operator. `written`: positions of arguments that it reads and writes. `groups`: the
    position of the number of groups."""

    name: str
    written: tuple[int, ...]
    flops: Callable[..., int] | None
    groups: int | None
    is_attention: bool
    is_copy: bool
    is_packed: bool
    is_collective: bool

    def name_of(self, args: Any) -> str:
        if self.groups is not None and args[self.groups] > 1:
            return f"{self.name} (grouped)"
        # The first argument is the query, or in the backward pass the result's gradient. Both have the heads.
        return f"{self.name} (heads of {args[0].shape[-1]})" if self.is_attention else self.name


@functools.cache
def _counted(func: Any) -> _Counted | None:
    """The operator's properties; None if it moves nothing."""
    packet, is_collective = func._overloadpacket, func.namespace in _NAMESPACES
    if not is_collective and (func.is_view or packet in _FREE):
        return None
    name, arguments = str(packet), func._schema.arguments
    return _Counted(
        name,
        ()
        if packet in _OVERWRITE
        else tuple(i for i, each in enumerate(arguments) if each.is_write and not each.is_out),
        _FORMULAS.get(packet),
        groups=_GROUPS.get(packet),
        is_attention="scaled_dot_product" in name,
        is_copy=packet in _COPIES,
        is_packed=name == _PACKED_PRODUCT,
        is_collective=is_collective,
    )


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _group_size(args: list[Any]) -> int:
    """The number of processes of a collective, from the process group in its arguments, or the group's name."""
    from torch.distributed import distributed_c10d as c10d

    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return int(c10d.ProcessGroup.unbox(arg).size())
        if isinstance(arg, str) and arg in c10d._world.pg_names.values():
            return int(c10d._resolve_process_group(arg).size())
    return int(torch.distributed.get_world_size())
