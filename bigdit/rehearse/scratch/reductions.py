"""Reductions that several blocks of threads share: the buffer in which they meet, and a semaphore a tile of outputs.

Source: setReduceConfig, gpu_reduce_kernel, global_memory_size and semaphore_size in Reduce.cuh, torch 2.11 to 2.13, in
aten/src/ATen/native/cuda; widths of loads and accumulators: ReduceSumProdKernel.cu, ReduceMomentKernel.cu,
ReduceNormKernel.cu and ReduceAMinMaxKernel.cu there. Shown by the referee's row of Sana on an A40, engine single.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bigdit.catalog.capability import WARP_SIZE
from bigdit.rehearse.scratch.iteration import Loop, loop
from bigdit.rehearse.scratch.launch import Card, Launch, Rule
from bigdit.rehearse.scratch.layout import Layout

aten = torch.ops.aten

_MOST_THREADS = 512
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # that a thread reads, where there are enough of them

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Reducer:
    """A kernel: bytes of what it accumulates in, bytes of an element, and how many a thread loads at once."""

    accumulator_bytes: int
    element_bytes: int
    load: int


@dataclass(frozen=True)
class Meeting:
    """What blocks share: bytes of their partial results, and of the semaphores."""

    buffer_bytes: int
    semaphore_bytes: int


def meeting(loop: Loop, kernel: Reducer, card: Card) -> Meeting | None:
    """None where every output is one block's own work. The loop's offsets fit 32 bits."""
    outputs = loop.outputs
    inputs = math.prod(loop.shape) // outputs
    along_input = not loop.shape or loop.reduced == len(loop.shape) or loop.input[0] < loop.input[loop.reduced]
    across, down = (inputs, outputs) if along_input else (outputs, inputs)
    fastest = (loop.input[0] if along_input else loop.input[loop.reduced]) if loop.shape else kernel.element_bytes
    vector = 1
    if fastest == kernel.element_bytes:
        if along_input and across >= 128 and loop.reduced == 1:
            across //= kernel.load
        elif not along_input:
            vector = _output_vector(loop, kernel.element_bytes)
            across //= vector
    width, height = _block(across, down, _MOST_THREADS // vector)

    inputs_a_step, outputs_a_step = (width, 1) if along_input else (1, width)
    values = -(-inputs // inputs_a_step)
    if values < min(height * 16, _MOST_VALUES):
        return None  # warps have outputs of their own
    inputs_a_step *= height
    values = -(-inputs // inputs_a_step)
    tiles = -(-(outputs // vector) // outputs_a_step)
    blocks = card.multiprocessors * (card.limits.threads // (width * height))
    if values < _MOST_VALUES or tiles > blocks:
        return None
    sharing = max(min(-(-blocks // tiles), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    if sharing < 2:
        return None
    lanes = 1 if along_input else width * vector
    return Meeting(kernel.accumulator_bytes * outputs * sharing * lanes, 4 * tiles)


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    """Width and height of a block of at most so many threads, powers of 2."""
    across, down = (_power_below(n) if n < most else most for n in (across, down))
    width = min(across, WARP_SIZE)
    height = min(down, most // width)
    return min(across, most // height), height


def _output_vector(loop: Loop, element_bytes: int) -> int:
    """How many neighbouring outputs a thread computes at once: as many as everything is a multiple of."""
    outer = loop.reduced
    steps = (stride // element_bytes for dim, stride in enumerate(loop.input) if dim != outer)
    vector = 4
    for n in (loop.offset // element_bytes, loop.shape[outer], *steps):
        while n % vector:
            vector //= 2
    return vector


def reduce(launch: Launch, tensor: Layout, dims: Sequence[int], output: torch.dtype, kernel: Reducer) -> None:
    """One reduction of `tensor` over `dims` into a result that is there; none where nothing is to be reduced.

    Where no blocks meet they take nothing, which is told too: so a step does the same at every micro-batch size.
    """
    if not tensor.nbytes:
        return
    kept, needed = _needed(launch.card, tensor, tuple(dims), output, kernel)
    with launch.holding(*kept):
        for sizes in needed:
            launch.briefly(*sizes)


@functools.cache  # a step has the same few reductions thousands of times
def _needed(
    card: Card, tensor: Layout, dims: tuple[int, ...], output: torch.dtype, kernel: Reducer
) -> tuple[list[int], list[tuple[int, int]]]:
    """The bytes that are held while all launches run, and those that each takes."""
    itemsize = tensor.dtype.itemsize
    whole = loop(tensor.shape, tensor.strides, tensor.offset, dims, itemsize, output.itemsize)
    pieces = list(whole.pieces())
    # What is accumulated between launches does not fit the result's elements.
    kept = len(pieces) > 1 and kernel.accumulator_bytes > output.itemsize
    needed = [meeting(piece, kernel, card) for piece in pieces]
    return [kernel.accumulator_bytes * _extent(whole, output)] if kept else [], [
        (0, 0) if each is None else (each.buffer_bytes, each.semaphore_bytes) for each in needed
    ]


def total(launch: Launch, tensor: Layout, dims: Sequence[int], output: torch.dtype) -> None:
    """sum or mean into a result that is there: half precision is added up in fp32, and read 8 numbers at a time."""
    read = _read(tensor.dtype, output)
    kernel = Reducer(_accumulator(read).itemsize, read.itemsize, 8 if read.itemsize == 2 else 4)
    _reduce_as(launch, tensor, read, dims, output, kernel)


def _reduce_as(
    launch: Launch, tensor: Layout, read: torch.dtype, dims: Sequence[int], output: torch.dtype, kernel: Reducer
) -> None:
    """The reduction of the tensor in another dtype, where that is not its own: it is cast first."""
    if tensor.dtype == read:
        reduce(launch, tensor, dims, output, kernel)
        return
    cast = replace(tensor, dtype=read, offset=0)
    with launch.holding(cast.nbytes):
        reduce(launch, cast, dims, output, kernel)


def _read(dtype: torch.dtype, output: torch.dtype) -> torch.dtype:
    """What a kernel reads for a result in `output`: half precision as it is where that is fp32, all else cast."""
    return dtype if dtype in _HALF and output == torch.float32 else output


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _extent(whole: Loop, output: torch.dtype) -> int:
    """Elements that an accumulator of a result has."""
    ends = (length * stride for length, stride in zip(whole.shape, whole.output, strict=True))
    return max(output.itemsize, *ends) // output.itemsize


def _dims(tensor: torch.Tensor, dims: Any) -> tuple[int, ...]:
    """All of them where none are named."""
    named = [dims] if isinstance(dims, int) else list(dims or [])
    return tuple(dim % max(tensor.dim(), 1) for dim in named) or tuple(range(tensor.dim()))


def _power_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _total(launch: Launch, tensor: torch.Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> None:
    launch.results()
    total(launch, Layout.of(tensor), _dims(tensor, dim), launch.result.dtype)


def _norm(
    launch: Launch, tensor: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> None:
    launch.results()
    output = launch.result.dtype
    read = _read(tensor.dtype, output)
    kernel = Reducer(_accumulator(read).itemsize, read.itemsize, 4)
    _reduce_as(launch, Layout.of(tensor), read, _dims(tensor, dim), output, kernel)


def _extreme(launch: Launch, tensor: torch.Tensor, dim: Any = None, keepdim: bool = False) -> None:
    launch.results()
    kernel = Reducer(tensor.dtype.itemsize, tensor.dtype.itemsize, 4)
    reduce(launch, Layout.of(tensor), _dims(tensor, dim), tensor.dtype, kernel)


def _truth(launch: Launch, tensor: torch.Tensor, dim: Any = None, keepdim: bool = False) -> None:
    # Source: ReduceLogicKernel.cu beside the others.
    launch.results()
    kernel = Reducer(torch.bool.itemsize, tensor.dtype.itemsize, 4)
    reduce(launch, Layout.of(tensor), _dims(tensor, dim), torch.bool, kernel)


def _spread(launch: Launch, tensor: torch.Tensor, dim: Any = None, **options: Any) -> None:
    # Mean, squares and two counts; twice the bytes in fp64.
    launch.results()
    kernel = Reducer(4 * _accumulator(tensor.dtype).itemsize, tensor.dtype.itemsize, 2)
    reduce(launch, Layout.of(tensor), _dims(tensor, dim), tensor.dtype, kernel)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _total),
    aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys((aten.amax.default, aten.amin.default, aten.max.default, aten.min.default), _extreme),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.all.default, aten.all.dim), _truth),
    **dict.fromkeys((aten.var.correction, aten.var_mean.correction, aten.std.correction), _spread),
}
