"""Many rehearsals, side by side in a few worker processes that stay for the next ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from bigdit.errors import UserError
from bigdit.machine import memory_bytes
from bigdit.rehearse import cache
from bigdit.rehearse.client import TookTooLong, ask, check, worker
from bigdit.rehearse.lanes import Lanes
from bigdit.rehearse.request import RehearsalRequest, RehearsedSize
from bigdit.units import GIB

MOST_WORKERS = 4
"""Batches of a search are of four and more rehearsals."""
WORKER_BYTES = 2 * GIB
"""Of this machine's memory for each worker beyond two: three times what one holds (benchmarks/README.md)."""

Done = Callable[[int, int], None]
"""Called with the rehearsals that are done and all that are asked for."""


def workers_here() -> int:
    """One for each core, and for each WORKER_BYTES: two at least, MOST_WORKERS at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(cores, memory_bytes() // WORKER_BYTES, MOST_WORKERS))


class Pool:
    """Answers requests of one micro-batch size each, from the cache or by `workers` processes: if none are named, as
    many as this machine has room for.

    They are forks of one, which starts when the cache does not know an answer and ends with the `with` block.
    """

    def __init__(self, workers: int | None = None, *, timeout_s: float = 300.0, done: Done | None = None) -> None:
        self._lanes = Lanes(worker, workers or workers_here())
        self._timeout_s = timeout_s
        self._done = done
        self._asked = self._answered = 0
        self.late = 0  # answers that took too long, as on a busy machine
        self._lock = threading.Lock()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self._lanes.end()

    def start(self) -> None:
        """Have the processes import what they need by the time of the first question."""
        self._lanes.start()

    def check_model(self, request: RehearsalRequest) -> None:
        """Raise UserError where the class of the request's model refuses its arguments, as it does of every step."""
        ask(self._lanes, 0, request.model_copy(update={"micro_batch_sizes": ()}), self._timeout_s)

    def rehearse(self, requests: Sequence[RehearsalRequest]) -> list[RehearsedSize | UserError]:
        """An answer for each request, in their order; what the user could mend stands in its place.

        Raises what is no user's error, such as RehearsalError.
        """
        for request in requests:
            check(request)
        found: list[RehearsedSize | UserError | None] = [
            cache.find(request, request.micro_batch_sizes[0]) for request in requests
        ]
        waiting = [at for at, answer in enumerate(found) if answer is None]
        self._asked += len(waiting)
        bugs: list[BaseException] = []

        def work(number: int) -> None:
            while not bugs:
                with self._lock:
                    if not waiting:
                        return
                    at = waiting.pop(0)
                try:
                    found[at] = self._answer(number, requests[at])
                except BaseException as error:
                    bugs.append(error)

        needed = range(min(self._lanes.count, len(waiting)))
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in needed]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if bugs:
            raise bugs[0]
        return [answer for answer in found if answer is not None]

    def _answer(self, number: int, request: RehearsalRequest) -> RehearsedSize | UserError:
        answer: RehearsedSize | UserError
        try:
            (answer,) = ask(self._lanes, number, request, self._timeout_s)
            cache.keep(request, answer)
        except UserError as error:
            answer = error
        with self._lock:
            self.late += isinstance(answer, TookTooLong)
            self._answered += 1
            if self._done is not None:
                self._done(self._answered, self._asked)
        return answer
