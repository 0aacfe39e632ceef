"""Ranges to encode, described so that any process of any machine that sees the same files can do them; and the workers
here that do, each handed one unit after another."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from bigdit import log
from bigdit.config.data import DataConfig, EncodersConfig
from bigdit.errors import UserError
from bigdit.extract.ranges import missing, pull, split
from bigdit.extract.report import UnitSpeed, shares_of
from bigdit.extract.server import server
from bigdit.extract.worker import Done, Failed, Finished, Note, Progress, Ready, Unit, work
from bigdit.sources.open import open_source
from bigdit.sources.protocol import Source
from bigdit.store.lease import remove_left
from bigdit.store.schema import EXTRACT, Range, StoreSchema, check_same


@dataclass(frozen=True)
class Job:
    """The parts that start in `span`, or `only` some, of the store data.features of `schema`; the worker processes of
    each that does it; the folder from which paths count."""

    data: DataConfig
    encoders: EncodersConfig
    schema: StoreSchema
    span: Range
    only: tuple[Range, ...] | None
    workers: int
    folder: Path

    def ranges(self) -> list[Range]:
        """Of the parts, done or not."""
        return split(self.schema.ranges(), *self.span) if self.only is None else list(self.only)

    def left(self) -> list[Range]:
        """Of the parts that are not done."""
        return missing(self.data.store, self.ranges())


def encode_here(job: Job, source: Source) -> None:
    """Encode what is missing of a job by processes of this machine, behind a progress bar on stderr.

    Others may be at the same job: what they have committed meanwhile is not done again. Raises as encode_in_workers.
    """
    root, ranges = job.data.store, job.left()
    units = (Unit(start, end, source.items(start, end)) for start, end in pull(root, ranges, random.Random()))
    with log.progress("extract", total=sum(end - start for start, end in ranges), unit=job.data.samples) as advance:

        def on_progress(progress: Progress, done: list[UnitSpeed]) -> None:
            advance(progress.pictures, shares_of(done).at_work() if done else "", progress.skipped)

        encode_in_workers(units, min(job.workers, len(ranges)), job.encoders, job.schema, root, on_progress)


def do(job: Job) -> None:
    """A job as a task of an engine does it, in a process that has yet to open the sources.

    Raises UserError where they are not those that the job was made for, and as encode_here.
    """
    try:
        os.chdir(job.folder)
    except OSError as error:
        raise UserError(f"{job.folder} is not there on this machine: {error.strerror}") from None
    source = open_source(job.data)
    found = job.schema.model_copy(update={"sources": source.identity["sources"]})
    check_same(job.data.store, job.schema, found)
    encode_here(job, source)


OnProgress = Callable[[Progress, list[UnitSpeed]], None]
"""Called with the pictures that were encoded or skipped since, and all units that were committed so far."""

_NOTHING = Progress(0, 0)


@dataclass
class Worker:
    """One process, the parent's end of its pipe, the unit it is at, and whether it said its last word."""

    number: int
    process: ForkServerProcess
    pipe: Connection
    unit: Unit | None = None
    finished: bool = False


def encode_in_workers(
    units: Iterator[Unit],
    count: int,
    encoders: EncodersConfig,
    schema: StoreSchema,
    root: Path,
    on_progress: OnProgress,
) -> list[UnitSpeed]:
    """Encode all units in `count` processes; no process is left behind, however this ends.

    Raises UserError where a worker reports one or dies; RuntimeError with the traceback of a bug in a worker.
    """
    workers: list[Worker] = []
    done: list[UnitSpeed] = []
    noted: set[str] = set()
    try:
        for number in range(count):
            workers.append(_start(number, encoders, schema, root))
        while at_work := {worker.pipe: worker for worker in workers if not worker.finished}:
            for pipe in wait(list(at_work)):
                progress = _hear(at_work[pipe], units, done, noted)  # type: ignore[index]  # wait() gives what it was given
                on_progress(progress, done)
    finally:
        for worker in workers:
            if not worker.finished:  # in the middle of a unit: what it was at is taken away below
                worker.process.terminate()
            worker.pipe.close()
        for worker in workers:
            worker.process.join()
        remove_left(root)
    return done


def _start(number: int, encoders: EncodersConfig, schema: StoreSchema, root: Path) -> Worker:
    context = server()
    ours, theirs = context.Pipe()
    process = context.Process(
        target=work, args=(theirs, number, encoders, schema, root), name=f"extract-{number}", daemon=True
    )
    try:
        process.start()
    except (EOFError, OSError) as error:  # not an EOFError, which click takes for Ctrl-D
        raise UserError(
            f"extraction worker {number} could not be started: the process that starts workers was killed, or cannot "
            f"start one ({error}); {EXTRACT} goes on from the parts done"
        ) from None
    theirs.close()  # with this end held by the worker alone, its death closes the pipe
    return Worker(number, process, ours)


def _hear(worker: Worker, units: Iterator[Unit], done: list[UnitSpeed], noted: set[str]) -> Progress:
    """Take one message of a worker; the progress that it tells of."""
    try:
        message = worker.pipe.recv()
        if isinstance(message, Ready):
            worker.unit = next(units, None)
            worker.pipe.send(worker.unit)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise _death(worker) from None
    if isinstance(message, Progress):
        return message
    if isinstance(message, Done):
        done.append(message.speed)
    elif isinstance(message, Note):
        if message.text not in noted:
            log.notice(message.text)
        noted.add(message.text)
    elif isinstance(message, Finished):
        worker.finished = True
    elif isinstance(message, Failed):
        if message.bug is not None:
            raise RuntimeError(f"extraction worker {worker.number} failed:\n{message.bug}")
        raise UserError(*message.problems)
    return _NOTHING


def _death(worker: Worker) -> UserError:
    """A worker that ended without a word: killed, for lack of memory perhaps, or crashed in native code."""
    worker.process.join()
    status = worker.process.exitcode or 0
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    where = f" at pictures {worker.unit.start} to {worker.unit.end - 1}" if worker.unit else ""
    memory = " (if memory ran out: fewer --workers)" if status == -signal.SIGKILL else ""
    return UserError(f"extraction worker {worker.number} {how}{where}{memory}; {EXTRACT} goes on from the parts done")
