"""What runs on emulated cards of the question's kind: strategies in so many bytes, and the largest micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from typing import Protocol

from bigdit.catalog import Gpu
from bigdit.errors import UserError
from bigdit.rehearse import RehearsalRequest
from bigdit.rehearse.card.attempt import Attempt, Attempts
from bigdit.rehearse.card.client import cuda_build, cuda_python
from bigdit.rehearse.lanes import RehearsalError
from bigdit.rehearse.pool import workers_here
from bigdit.search.finding.candidates import LARGEST_MICRO_BATCH

Asked = tuple[RehearsalRequest, int]
"""Two steps, and the bytes that torch may reserve for them."""
Sized = Callable[[int], RehearsalRequest]
"""Two steps by the micro-batch size."""


class Device(Protocol):
    """Where strategies are tried. What it did not try is as it was rehearsed, and else as it is predicted.

    `count`: how many are tried side by side; 0 where nothing is. `build`: of the torch that runs there. `unanswered`:
    why some of what was asked could not be run, in lines.
    """

    count: int
    build: str | None
    unanswered: dict[str, None]

    def run(self, asked: Sequence[Asked]) -> list[Attempt | None]:
        """An attempt for each, in their order; None for one that was not made."""
        ...

    def largest(self, rows: Sequence[tuple[Sized, int]], capacity_bytes: int) -> list[int | None]:
        """For each row, a request by its micro-batch size and a guess, the largest size that fits where the next one
        does not, to LARGEST_MICRO_BATCH; 0 for none, and None where one was not made."""
        ...


class NoCards(Device):
    """Nothing is tried: rehearsals alone answer."""

    def __init__(self) -> None:
        self.count, self.build, self.unanswered = 0, None, {}

    def run(self, asked: Sequence[Asked]) -> list[Attempt | None]:
        return [None] * len(asked)

    def largest(self, rows: Sequence[tuple[Sized, int]], capacity_bytes: int) -> list[int | None]:
        return [None] * len(rows)


NO_CARDS = NoCards()


class Cards(Device):
    """A few emulated cards side by side, as many as there are processes that rehearse; they end with the `with` block.

    `done` is called with the attempts made so far. Raises UserError where there is no CUDA build of torch.
    """

    def __init__(self, gpu: Gpu, *, done: Callable[[int], None] | None = None) -> None:
        self.count = workers_here()
        self.build = cuda_build(cuda_python())
        self.attempts = Attempts(gpu, self.count)
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

    def run(self, asked: Sequence[Asked]) -> list[Attempt | None]:
        return list(self._threads.map(self._run, asked))

    def largest(self, rows: Sequence[tuple[Sized, int]], capacity_bytes: int) -> list[int | None]:
        return list(self._threads.map(lambda row: self._largest(row[0], row[1], capacity_bytes), rows))

    def _largest(self, request: Sized, guess: int, capacity_bytes: int) -> int | None:
        fitting, failing, stride = 0, LARGEST_MICRO_BATCH + 1, 1
        size = min(max(guess, 1), LARGEST_MICRO_BATCH)
        while fitting + 1 < failing:
            attempt = self._run((request(size), capacity_bytes))
            if attempt is None:
                return None
            fitting, failing = (size, failing) if attempt.fits else (fitting, size)
            if fitting and failing <= LARGEST_MICRO_BATCH:
                size = (fitting + failing) // 2
            else:  # away from the guess, in strides that grow
                size = min(fitting + stride, failing - 1) if fitting else max(failing - stride, 1)
                stride *= 2
        return fitting

    def _run(self, asked: Asked) -> Attempt | None:
        request, capacity_bytes = asked
        card = self._free.get()
        try:
            return self.attempts.run(request, capacity_bytes, card=card)
        except (UserError, RehearsalError) as error:
            self.unanswered[str(error).splitlines()[0].rstrip(":")] = None
            return None
        finally:
            self._free.put(card)
            with self._lock:
                self._made += 1
                if self._done is not None:
                    self._done(self._made)
