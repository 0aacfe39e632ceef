"""Steps that are read before they are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")


def read_ahead(read: Callable[[int], T], steps: Iterable[int], ahead: int, reader: Executor) -> Iterator[T]:
    """`read(step)` of each step, in order; `reader` is given the next `ahead` steps before one is handed out.

    So `ahead` + 1 steps exist at once, where the caller lets go of one before it asks for the next.
    """
    queue: deque[Future[T]] = deque()
    for step in steps:
        queue.append(reader.submit(read, step))
        if len(queue) > ahead:
            yield queue.popleft().result()
    while queue:
        yield queue.popleft().result()
