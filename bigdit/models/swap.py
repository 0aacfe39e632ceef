"""Block swap: weights of the first blocks are in CPU memory, and are copied while the previous block computes.

Frozen weights never change. Trained ones are stepped in the backward pass, and copied back.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bigdit import optim, shortage
from bigdit.errors import UserError
from bigdit.memory import CUDA_GRANULARITY, pinned_bytes, rounded
from bigdit.models.family import Family
from bigdit.strategy import swap_misfit
from bigdit.units import GIB, gib

ROOMS = 2
"""Blocks whose weights are on the device at once: the current one and the next one."""
MOST_LOCKED_AT_ONCE = GIB
"""Bytes of weights that are pinned at once. They need this CPU memory besides the weights."""
_SWAP = "swap"
"""The attribute of a model that holds its Swap."""


def swap_blocks(model: nn.Module, family: Family, first: int, *, trained: bool, quantised: bool = False) -> None:
    """Keep weights of the first `first` blocks in CPU memory, once their Swap has moved the model.

    These are the frozen weights, or all if they are `trained`. `quantised`: moving a block to a device quantises its
    weights. Call it before checkpointing, because a recomputed block fetches its weights again. All of these blocks
    must be checkpointed: otherwise autograd would save tensors in memory that another block reuses. Raises UserError if
    the model has fewer blocks.
    """
    blocks = family.blocks(model)
    if misfit := swap_misfit(first, len(blocks)):
        raise UserError(misfit)
    swap = Swap([_Weights(block, family.shared(model), trained) for block in blocks[:first]], quantised=quantised)
    for number, block in enumerate(blocks[:first]):
        block.forward = functools.partial(swap.run, number, block.forward)
    setattr(model, _SWAP, swap)


def swap_of(model: nn.Module) -> Swap | None:
    """The Swap of the model; None if it has none."""
    found: Swap | None = getattr(model, _SWAP, None)
    return found


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """The model, in place, on the device; swapped weights stay in CPU memory."""
    swap = swap_of(model)
    return model.to(device) if swap is None else swap.moved(model, device)


class _Weights:
    """The frozen weights of a block, or all if they are `trained`; without those of `shared` modules, which the model
    also calls from outside of the block."""

    def __init__(self, block: nn.Module, shared: Sequence[nn.Module], trained: bool) -> None:
        self._block, self._shared, self._trained = block, shared, trained
        self._find()

    def _find(self) -> None:
        left_out = {parameter for module in self._shared for parameter in module.parameters()}
        found = [
            (module._parameters, name, parameter)
            for module in self._block.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and (self._trained or not parameter.requires_grad) and parameter not in left_out
        ]
        for module in self._block.modules():
            if (state := getattr(module, "quant_state", None)) is not None:  # bitsandbytes keeps nf4's scales there
                there = vars(state)
                there |= {name: nn.Parameter(there[name], requires_grad=False) for name in ("absmax", "code")}
                found += [(there, name, there[name]) for name in ("absmax", "code")]
        self.parameters = [parameter for _, _, parameter in found]
        self._places = [(place, name) for place, name, _ in found]

    def quantise(self, device: torch.device) -> None:
        """Move the block to the device, which quantises it, and back."""
        self._block.to(device).to("cpu")
        self._find()

    def put(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the block compute with these parameters."""
        for (place, name), parameter in zip(self._places, parameters, strict=True):
            place[name] = parameter


class Swap:
    """Page-locked memory for the weights of `blocks`, and two buffers ("rooms") on the device that blocks use in turn.

    Rooms are allocated once, so that their bytes depend on no allocator. Blocks may run in any order, each with its own
    weights. The block to copy ahead is a guess that the order continues.
    """

    def __init__(self, blocks: Sequence[_Weights], *, quantised: bool = False) -> None:
        self.blocks = blocks
        self._quantised = quantised
        self._last = 0

    def moved(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, in place, on the device, without these weights, which move to page-locked memory.

        On a CPU this saves nothing.
        """
        for block in self.blocks if self._quantised else ():  # one by one: the device has memory for two
            block.quantise(device)
        swapped = {parameter for block in self.blocks for parameter in block.parameters}
        model._apply(lambda tensor: tensor if tensor in swapped else tensor.to(device))
        self._start(device)
        return model

    def step_in_backward(self, optimizer: Optimizer, *, taken: Callable[[], bool]) -> None:
        """`optim.step_in_backward` for swapped weights that are trained: each is stepped on the device, as the
        parameter that the optimizer knows, and copied to CPU memory."""
        for weight, there in self.rooms.items():
            if weight.requires_grad:
                there.register_post_accumulate_grad_hook(functools.partial(self._step, optimizer, taken, weight))

    def settle(self) -> None:
        """Wait until stepped weights are in CPU memory."""
        self._device.synchronize()

    def forget(self) -> None:
        """Mark the rooms as empty, because the weights in CPU memory have changed."""
        self._held: list[int | None] = [None] * ROOMS

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, taken: Callable[[], bool], weight: nn.Parameter, there: nn.Parameter) -> None:
        gradient, there.grad = there.grad, None
        if not taken():
            return
        with with_data(weight, there.data):
            weight.grad = gradient
            optim.step_alone(optimizer, weight)
            weight.grad = None
        self._copies.wait_stream(self._device.current_stream())
        with self._device.stream(self._copies):
            weight.copy_(there, non_blocking=True)

    def _start(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device)
        self._copies = self._device.Stream()
        _move_to_host([parameter for block in self.blocks for parameter in block.parameters], pin=device.type != "cpu")
        sizes = [sum(map(_size, block.parameters)) for block in self.blocks]
        rooms = [
            torch.empty(max(sizes[room::ROOMS], default=0), dtype=torch.uint8, device=device) for room in range(ROOMS)
        ]
        self._in_room = [_in_row(rooms[number % ROOMS], block.parameters) for number, block in enumerate(self.blocks)]
        self.rooms = {
            weight: there
            for block, room in zip(self.blocks, self._in_room, strict=True)
            for weight, there in zip(block.parameters, room, strict=True)
        }
        self.forget()

    def run(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The block's own `forward`, with its weights on the device."""
        self._fetch(number)
        block = self.blocks[number]
        block.put(self._in_room[number])
        try:
            return forward(*args, **kwargs)
        finally:  # a checkpoint ends its recomputation with an exception
            block.put(block.parameters)

    def _fetch(self, number: int) -> None:
        """Wait for the block's weights, and start to copy those of the next one."""
        self._bring(number)
        self._device.current_stream().wait_stream(self._copies)
        onward = number == 0 or number == self._last + 1
        self._last = number
        follows = number + 1 if onward else number - 1
        if follows < len(self.blocks):
            self._bring(follows)

    def _bring(self, number: int) -> None:
        """Copy the block's weights to its room, after all work that was launched before.

        Only that work needs the old contents of the room: in a backward pass, autograd finishes a block before it
        recomputes an earlier one.
        """
        room = number % ROOMS
        if self._held[room] == number:
            return
        self._held[room] = number
        self._copies.wait_stream(self._device.current_stream())
        with torch.no_grad(), self._device.stream(self._copies):
            for there, waiting in zip(self._in_room[number], self.blocks[number].parameters, strict=True):
                there.copy_(waiting, non_blocking=True)


@contextmanager
def with_data(weight: nn.Parameter, data: torch.Tensor) -> Iterator[None]:
    """Give the weight these values, on any device, within the block."""
    waiting, weight.data = weight.data, data
    try:
        yield
    finally:
        weight.data = waiting


def _move_to_host(parameters: Sequence[nn.Parameter], *, pin: bool) -> None:
    """Move these parameters, in place, to page-locked memory. Raises UserError if that runs out."""
    for run in _runs(parameters):
        chunk = _locked(sum(map(_size, run)), pin, sum(map(_size, parameters)))
        for parameter, locked in zip(run, _in_row(chunk, run), strict=True):
            parameter.data = locked.data.copy_(parameter.data)


def _locked(nbytes: int, pin: bool, of_all: int) -> torch.Tensor:
    """`nbytes` of CPU memory, for weights of `of_all` bytes in total."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
    except RuntimeError as error:
        if not shortage.ran_out(error):
            raise
        there = shortage.message(None, *shortage.room(torch.device("cpu")))
        raise UserError(
            f"strategy.blocks_to_swap: {gib(of_all)} of weights need page-locked CPU memory, which ran out: "
            f"{gib(nbytes)} were requested, {there}; swap fewer blocks, or raise what limits this process (ulimit -l "
            "and -v, its container)"
        ) from error


def _runs(parameters: Sequence[nn.Parameter]) -> list[Sequence[nn.Parameter]]:
    """The parameters cut into runs that need the least page-locked memory; each run is one allocation.

    torch rounds allocations up to powers of two: a whole block of Flux.1 would take 1.6 or 1.9 times its size.
    """
    sizes, locked, first_of_last = [*map(_size, parameters)], [0], [0]
    for stop in range(1, len(parameters) + 1):
        nbytes, possible = 0, list[tuple[int, int]]()
        for first in reversed(range(stop)):
            nbytes += sizes[first]
            if possible and nbytes > MOST_LOCKED_AT_ONCE:
                break
            possible.append((locked[first] + pinned_bytes(nbytes), first))
        least, first = min(possible)
        locked.append(least)
        first_of_last.append(first)
    runs, stop = [], len(parameters)
    while stop:
        runs.append(parameters[first_of_last[stop] : stop])
        stop = first_of_last[stop]
    return runs[::-1]


def _in_row(row: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters of these shapes, consecutive in the bytes of `row`."""
    found, start = [], 0
    for parameter in parameters:
        values = row[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        if hasattr(parameter, "quant_state"):  # bitsandbytes' weights know their shape
            found.append(copy.copy(parameter))
            found[-1].data = values
        else:
            found.append(nn.Parameter(values, requires_grad=parameter.requires_grad))
        start += _size(parameter)
    return found


def _size(parameter: nn.Parameter) -> int:
    """Its bytes in a row, aligned as by the device's allocator, because kernels are chosen by alignment."""
    return rounded(parameter.nbytes, CUDA_GRANULARITY)
