"""Ranges to encode, described so that any process of any machine that sees the same files can do them."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

from bigdit import log
from bigdit.config.data import DataConfig, EncodersConfig
from bigdit.errors import UserError
from bigdit.extract.pool import encode_in_workers
from bigdit.extract.ranges import missing, pull, split
from bigdit.extract.speed import UnitSpeed, shares_of
from bigdit.extract.worker import Progress, Unit
from bigdit.sources.open import open_source
from bigdit.sources.protocol import Source
from bigdit.store.schema import Range, StoreSchema, check_same


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
