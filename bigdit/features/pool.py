"""Worker processes that are handed one unit after another: fast ones take more, a dead one is an error."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from bigdit.config.run import EncodersConfig
from bigdit.errors import UserError
from bigdit.features.schema import EXTRACT
from bigdit.features.worker import Done, Failed, Progress, Unit, work


@dataclass
class Worker:
    """One process, the parent's end of its pipe, the unit it is at, and what it has done."""

    number: int
    process: SpawnProcess
    pipe: Connection
    unit: Unit | None = None
    parts: int = 0
    pictures: int = 0
    seconds: float = 0.0


def encode_in_workers(
    units: Iterator[Unit],
    count: int,
    encoders: EncodersConfig,
    buckets: Sequence[tuple[int, int]],
    root: Path,
    on_progress: Callable[[int], None],
) -> list[Worker]:
    """Encode all units in `count` processes; no process is left behind, however this ends.

    Raises UserError where a worker reports one or dies; RuntimeError with the traceback of a bug in a worker.
    """
    workers: list[Worker] = []
    try:
        for number in range(count):
            workers.append(_start(number, encoders, buckets, root))
        for worker in workers:
            _hand_over(worker, units)
        while busy := {worker.pipe: worker for worker in workers if worker.unit is not None}:
            for pipe in wait(list(busy)):
                _hear(busy[pipe], units, on_progress)  # type: ignore[index]  # wait() gives back what it was given
    finally:
        for worker in workers:
            if worker.unit is not None:  # in the middle of a unit: it leaves a temporary file at most
                worker.process.terminate()
            worker.pipe.close()
        for worker in workers:
            worker.process.join()
    return workers


def _start(number: int, encoders: EncodersConfig, buckets: Sequence[tuple[int, int]], root: Path) -> Worker:
    context = multiprocessing.get_context("spawn")  # torch's threads and locks do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(
        target=work, args=(theirs, encoders, buckets, root), name=f"extract-{number}", daemon=True
    )
    process.start()
    theirs.close()  # with this end held by the worker alone, its death closes the pipe
    return Worker(number, process, ours)


def _hand_over(worker: Worker, units: Iterator[Unit]) -> None:
    """The next unit, or None when there are no more."""
    worker.unit = next(units, None)
    try:
        worker.pipe.send(worker.unit)
    except (BrokenPipeError, ConnectionResetError):
        raise _death(worker) from None


def _hear(worker: Worker, units: Iterator[Unit], on_progress: Callable[[int], None]) -> None:
    """Take one message of a worker."""
    try:
        message = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        raise _death(worker) from None
    if isinstance(message, Progress):
        on_progress(message.pictures)
    elif isinstance(message, Done):
        worker.parts += 1
        worker.pictures += message.pictures
        worker.seconds += message.seconds
        _hand_over(worker, units)
    elif isinstance(message, Failed):
        if message.bug is not None:
            raise RuntimeError(f"extraction worker {worker.number} failed:\n{message.bug}")
        raise UserError(*message.problems)


def _death(worker: Worker) -> UserError:
    """A worker that ended without a word: killed, for lack of memory perhaps, or crashed in native code."""
    worker.process.join()
    status = worker.process.exitcode or 0
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    where = f" at pictures {worker.unit.start} to {worker.unit.end - 1}" if worker.unit else ""
    memory = " (if memory ran out: fewer --workers)" if status == -signal.SIGKILL else ""
    return UserError(f"extraction worker {worker.number} {how}{where}{memory}; {EXTRACT} goes on from the parts done")
