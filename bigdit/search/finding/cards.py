"""What runs on emulated cards of the question's kind: strategies in so many bytes, and the largest micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Protocol

from bigdit.catalog import Gpu
from bigdit.errors import UserError
from bigdit.rehearse import RehearsalRequest
from bigdit.rehearse.card.attempt import Attempt, Attempts, Shallow
from bigdit.rehearse.card.client import cuda_build, cuda_python
from bigdit.rehearse.lanes import RehearsalError
from bigdit.rehearse.pool import workers_here
from bigdit.search.question import LARGEST_MICRO_BATCH

Asked = tuple[RehearsalRequest, int]
"""Two steps, and the bytes that torch may reserve for them."""


@dataclass(frozen=True)
class Row:
    """Two steps by the micro-batch size, of which the largest is looked for: `guess` is about as many as fit, and
    `sample_bytes` about what one more takes, where that is known."""

    request: Callable[[int], RehearsalRequest]
    guess: float
    sample_bytes: float = math.inf


class Device(Protocol):
    """Where strategies are tried. What it did not try is as it was rehearsed, and else as it is predicted.

    `count`: how many are tried side by side; 0 where nothing is. `build`: of the torch that runs there. `unanswered`:
    why some of what was asked could not be run, in lines.
    """

    count: int
    build: str | None
    unanswered: dict[str, None]

    def run(self, asked: Sequence[Asked], *, to_end: bool = True) -> list[Attempt | None]:
        """An attempt for each, in their order; None for one that was not made. Without `to_end` those that do not fit
        tell no more than that."""
        ...

    def largest(self, rows: Sequence[Row], capacity_bytes: int) -> list[float | None]:
        """For each row the largest size that fits where the next one does not, to LARGEST_MICRO_BATCH, and about which
        part of the next one has room; below 1 for none, and None where one was not made."""
        ...


class NoCards(Device):
    """Nothing is tried: rehearsals alone answer."""

    def __init__(self) -> None:
        self.count, self.build, self.unanswered = 0, None, {}

    def run(self, asked: Sequence[Asked], *, to_end: bool = True) -> list[Attempt | None]:
        return [None] * len(asked)

    def largest(self, rows: Sequence[Row], capacity_bytes: int) -> list[float | None]:
        return [None] * len(rows)


NO_CARDS = NoCards()


class Cards(Device):
    """A few emulated cards side by side, as many as there are processes that rehearse; they end with the `with` block.

    `shallow`: the same steps of few blocks, which tell whether memory follows from values; `done` is called with the
    attempts made so far. Raises UserError where there is no CUDA build of torch.
    """

    def __init__(
        self, gpu: Gpu, *, shallow: Shallow = lambda request: request, done: Callable[[int], None] | None = None
    ) -> None:
        self.count = workers_here()
        self.build = cuda_build(cuda_python())
        self.attempts = Attempts(gpu, self.count, shallow=shallow)
        self.unanswered: dict[str, None] = {}
        self._free: SimpleQueue[int] = SimpleQueue()
        for card in range(self.count):
            self._free.put(card)
        self._threads = ThreadPoolExecutor(self.count)
        self._lock = Lock()
        self._done = done
        self._made = 0

    def __enter__(self) -> Cards:
        self._threads.submit(self.attempts.lanes.start)  # libraries are imported by the time of the first attempt
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.attempts.lanes.end()

    def run(self, asked: Sequence[Asked], *, to_end: bool = True) -> list[Attempt | None]:
        return list(self._threads.map(partial(self._run, to_end=to_end), asked))

    def largest(self, rows: Sequence[Row], capacity_bytes: int) -> list[float | None]:
        return list(self._threads.map(lambda row: self._largest(row, capacity_bytes), rows))

    def _largest(self, row: Row, capacity_bytes: int) -> float | None:
        fitting, failing, stride, room = 0, LARGEST_MICRO_BATCH + 1, 1, 0.0
        size = expected = min(max(int(row.guess), 1), LARGEST_MICRO_BATCH)
        while fitting + 1 < failing:
            attempt = self._run((row.request(size), capacity_bytes), to_end=False)
            if attempt is None:
                return None
            if attempt.fits:  # on to the last that there is room for, and one more; in strides that grow where it fits
                stride = 1 if size <= expected else 2 * stride
                fitting, room = size, (capacity_bytes - attempt.peak_reserved_bytes) / row.sample_bytes
                expected = size + int(room)
                size = min(max(expected, size + max(stride // 2, 1)), failing - 1)
            else:
                failing = size
                size = (fitting + failing) // 2 if fitting else max(failing - stride, 1)
                stride *= 2
        return fitting + min(room, 0.99)

    def _run(self, asked: Asked, *, to_end: bool) -> Attempt | None:
        request, capacity_bytes = asked
        card = self._free.get()
        try:
            return self.attempts.run(request, capacity_bytes, to_end=to_end, card=card)
        except (UserError, RehearsalError) as error:
            self.unanswered[str(error).splitlines()[0].rstrip(":")] = None
            return None
        finally:
            self._free.put(card)
            with self._lock:
                self._made += 1
                if self._done is not None:
                    self._done(self._made)
