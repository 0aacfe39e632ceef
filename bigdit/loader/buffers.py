"""Memory of batches on the host, used again once a batch is let go of: fresh pages cost as much as what is read."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque

import numpy as np
import numpy.typing as npt
import torch


class Buffers:
    """Tensors for one stream of batches, of as many bytes a name as its largest batch takes.

    Pageable ones are views of memory that comes back when nothing refers to them any longer, graphs of autograd
    included. Page-locked ones come from torch's own pool, which also waits for copies that a GPU still reads.
    """

    def __init__(self, capacities: dict[str, int], *, pinned: bool) -> None:
        self._capacities = capacities
        self._pinned = pinned
        self._free: dict[tuple[str, int], deque[tuple[npt.NDArray[np.uint8], list[int]]]] = defaultdict(deque)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
        """A tensor [rows, …], and how many bytes of each row may differ from zero, for the caller to keep up."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._pinned:
            return torch.empty(shape, dtype=dtype, pin_memory=True), [nbytes // shape[0]] * shape[0]
        free = self._free[name, shape[0]]
        try:
            memory, filled = free.pop()
        except IndexError:
            memory, filled = np.zeros(self._capacities[name], np.uint8), [0] * shape[0]
        view = memory[:nbytes]
        finalizer = weakref.finalize(view, free.append, (memory, filled))
        finalizer.atexit = False
        return torch.from_numpy(view).view(dtype).view(shape), filled
