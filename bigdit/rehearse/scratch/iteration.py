"""The loop of a reduction, as TensorIterator sets it up: dimensions sorted by strides and joined where they can be.

Source: TensorIteratorBase in aten/src/ATen/TensorIterator.cpp (reorder_dimensions, coalesce_dimensions,
can_use_32bit_indexing, get_dim_to_split, split), torch 2.11 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_MOST = 2**31 - 1


@dataclass(frozen=True)
class Loop:
    """Dimensions from the fastest on, reduced ones first. Strides and the input's offset are in bytes; the stride of
    the output is 0 along reduced dimensions."""

    shape: tuple[int, ...]
    output: tuple[int, ...]
    input: tuple[int, ...]
    offset: int = 0

    @property
    def reduced(self) -> int:
        """The number of dimensions that are summed over."""
        return self.output.count(0)

    @property
    def outputs(self) -> int:
        """The number of results."""
        return math.prod(length for length, stride in zip(self.shape, self.output, strict=True) if stride)

    def pieces(self) -> Iterator[Loop]:
        """Loops whose offsets fit 32 bits, each launched by itself."""
        if self._fits():
            yield self
            return
        dim = self._longest()
        first = self.shape[dim] // 2
        yield from self._narrow(dim, 0, first).pieces()
        yield from self._narrow(dim, first, self.shape[dim] - first).pieces()

    def _fits(self) -> bool:
        furthest = (
            1 + sum((length - 1) * stride for length, stride in zip(self.shape, strides, strict=True))
            for strides in (self.output, self.input)
        )
        return math.prod(self.shape) <= _MOST and max(furthest) <= _MOST

    def _longest(self) -> int:
        extents = [
            (length - 1) * max(strides) for length, *strides in zip(self.shape, self.output, self.input, strict=True)
        ]
        return max(reversed(range(len(extents))), key=extents.__getitem__)

    def _narrow(self, dim: int, start: int, length: int) -> Loop:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return replace(self, shape=shape, offset=self.offset + start * self.input[dim])


def loop(
    shape: Sequence[int], strides: Sequence[int], offset: int, dims: Sequence[int], input_bytes: int, output_bytes: int
) -> Loop:
    """Over `dims` of a tensor with these strides and storage offset, into a new, contiguous result.

    Strides and offset are in elements, of `input_bytes`; those of the result are of `output_bytes`.
    """
    output, step = [0] * len(shape), output_bytes
    for dim in reversed(range(len(shape))):
        if dim not in dims:
            output[dim], step = step, step * shape[dim]
    whole = Loop(tuple(shape), tuple(output), tuple(n * input_bytes for n in strides), offset * input_bytes)
    return _joined(_sorted(whole))


def _sorted(whole: Loop) -> Loop:
    """An insertion sort, from the last dimension on, that leaves alone what it cannot compare."""
    order = list(reversed(range(len(whole.shape))))
    for start in range(1, len(order)):
        here = start
        for before in reversed(range(start)):
            compared = _compare(whole, order[before], order[here])
            if compared < 0:
                break
            if compared > 0:
                order[before], order[here] = order[here], order[before]
                here = before
    shape, output, input = (tuple(values[dim] for dim in order) for values in (whole.shape, whole.output, whole.input))
    return Loop(shape, output, input, whole.offset)


def _compare(whole: Loop, first: int, second: int) -> int:
    """Below 0: `first` is the faster dimension; above: the slower one; 0: nothing says so."""
    if (whole.output[first] == 0) != (whole.output[second] == 0):
        return 1 if whole.output[second] == 0 else -1
    for strides in (whole.output, whole.input):
        if not strides[first] or not strides[second]:
            continue
        if strides[first] != strides[second]:
            return -1 if strides[first] < strides[second] else 1
        if whole.shape[first] > whole.shape[second]:
            return 1
    return 0


def _joined(whole: Loop) -> Loop:
    dims: list[tuple[int, int, int]] = []
    for dim in zip(whole.shape, whole.output, whole.input, strict=True):
        if dims and _can_join(dims[-1], dim):
            length, *strides = dims.pop()
            output, input = dim[1:] if length == 1 else strides
            dims.append((length * dim[0], output, input))
        else:
            dims.append(dim)
    shape, outputs, inputs = (tuple(column) for column in zip(*dims, strict=True)) if dims else ((), (), ())
    return Loop(shape, outputs, inputs, whole.offset)


def _can_join(before: tuple[int, ...], dim: tuple[int, ...]) -> bool:
    if before[0] == 1 or dim[0] == 1:
        return True
    return all(before[0] * fast == slow for fast, slow in zip(before[1:], dim[1:], strict=True))
