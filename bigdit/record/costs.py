"""What operators compute and move, and what collectives send: counted as a recording goes by."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry

from bigdit.memory import Collective, OperatorCost

# Collectives as the dispatcher names them: c10d's methods, and the functional ones that DTensor calls.
_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}
_NAMESPACES = ("c10d", "_c10d_functional")
# They allocate, and neither read nor write; or hand one number to the program.
_FREE = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten._local_scalar_dense,
}


def _convolution_backward_flops(
    grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *options: Any, **known: Any
) -> int:
    """As many as the forward pass for each gradient that is asked for.

    torch's own formula (conv_backward_flop in torch/utils/flop_counter.py, 2.13) takes the weight's gradient
    of a grouped convolution for that of a dense one, which for depthwise ones is too much by their channels.
    """
    transposed, asked = options[4], options[-1]
    return (asked[0] + asked[1]) * conv_flop_count(input.shape, weight.shape, grad_output.shape, transposed=transposed)


_FORMULAS = flop_registry | {torch.ops.aten.convolution_backward: _convolution_backward_flops}


Key = tuple[int, str, str]
"""Span, operator, dtype."""


class Costs:
    """Sums by phase and operator. FLOPs follow the formulas of torch.utils.flop_counter (a multiply-add is 2);
    bytes are those of every tensor that an operator reads and writes, once each."""

    def __init__(self) -> None:
        self._calls: Counter[Key] = Counter()
        self._flops: Counter[Key] = Counter()
        self._bytes: Counter[Key] = Counter()
        self._collectives: list[Collective] = []

    def add(self, span: int, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one call of `func` in the span of that number."""
        if func.namespace in _NAMESPACES:
            self._add_collective(span, func, args, kwargs, result)
            return
        packet = func._overloadpacket
        if func.is_view or packet in _FREE:
            return
        tensors = _tensors((args, result))
        if not tensors:
            return
        # The dtype of the arithmetic decides its rate.
        key = (span, str(packet), str(tensors[0].dtype).removeprefix("torch."))
        self._calls[key] += 1
        self._bytes[key] += sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
        if packet in _FORMULAS:
            self._flops[key] += _FORMULAS[packet](*args, **kwargs, out_val=result)

    def operators(self) -> tuple[OperatorCost, ...]:
        return tuple(
            OperatorCost(*key, calls=calls, flops=self._flops[key], nbytes=self._bytes[key])
            for key, calls in self._calls.items()
        )

    def collectives(self) -> tuple[Collective, ...]:
        """In the order in which they were called."""
        return tuple(self._collectives)

    def _add_collective(self, span: int, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = _COLLECTIVES.get(func._opname)
        if name is None:
            return  # waits and barriers send nothing
        # Of an all-gather the whole result counts, of a reduce-scatter the whole input: the largest tensor it has.
        nbytes = max(tensor.nbytes for tensor in _tensors((args, result)))
        self._collectives.append(Collective(span, name, nbytes, _group_size([*args, *kwargs.values()])))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _group_size(args: list[Any]) -> int:
    """The processes of a collective, from the process group among its arguments, or that group's name."""
    from torch.distributed import distributed_c10d as c10d

    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return int(c10d.ProcessGroup.unbox(arg).size())
        if isinstance(arg, str) and arg in c10d._world.pg_names.values():
            return int(c10d._resolve_process_group(arg).size())
    return int(torch.distributed.get_world_size())
