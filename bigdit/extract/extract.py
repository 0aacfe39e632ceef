"""Encodes the images and captions of a run into its store: the missing parts, in parallel, each once.

A job is a set of ranges to encode. Any process of any machine with the same files can do it. Here, workers of this
machine do it.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from bigdit import log
from bigdit.catalog.conditions import condition_problems
from bigdit.catalog.families import class_count, fill_channels, takes_classes
from bigdit.config.data import DataConfig, EncodersConfig
from bigdit.config.run import RunConfig
from bigdit.encoders.fit import encoder_misfits
from bigdit.encoders.load import FirstFrames, load_image_codec, load_text_encoder
from bigdit.errors import UserError
from bigdit.extract.worker import Done, Failed, Finished, Note, Progress, Ready, Unit, server, work
from bigdit.files import write_text
from bigdit.sources.open import SourceList, open_source
from bigdit.store.changes import Items, grow, numbered
from bigdit.store.files import url_of
from bigdit.store.growth import commit_growth, latest_schema
from bigdit.store.lease import missing, own_folder, pull, remove_left
from bigdit.store.listing import remove_old_listings, write_listings
from bigdit.store.report import FILE as REPORT
from bigdit.store.report import ExtractReport, StoreReport, UnitSpeed, extract_report, shares_of, store_report
from bigdit.store.schema import EXTRACT, Range, StoreSchema, claim, store_identity
from bigdit.store.store import write_null_text
from bigdit.strategy import ModelSpec


@dataclass(frozen=True)
class Job:
    """The parts of the store data.features with `schema` that start in `span`, or those in `only`.

    `workers`: the processes of each task. `folder`: the folder that paths are relative to.
    """

    data: DataConfig
    encoders: EncodersConfig
    schema: StoreSchema
    span: Range
    only: tuple[Range, ...] | None
    workers: int
    folder: Path

    def ranges(self) -> list[Range]:
        """The ranges of all parts of the job."""
        return split(self.schema.ranges(), *self.span) if self.only is None else list(self.only)

    def left(self) -> list[Range]:
        """The ranges of missing parts."""
        return missing(self.data.store, self.ranges())


RunJob = Callable[[Job, Items], None]
"""Completes a job in processes of this machine or of others. Raises UserError on failure."""


def extract(
    run: RunConfig,
    model: ModelSpec,
    workers: int | None = None,
    *,
    start: int | None = None,
    end: int | None = None,
    shard: str | None = None,
    engine: RunJob | None = None,
    only: Sequence[Range] | None = None,
    by_content: bool = False,
) -> ExtractReport:
    """Complete the store of `run`. A second call resumes, and encodes what changed in the sources.

    Only parts that start in source indices [start, end) or in shard k/n, or those in `only`, are encoded. `workers`:
    the processes of each task of an engine; data.workers by default. `engine`: None encodes here. `by_content`: compare
    all files with the store, even if names, sizes and times agree.

    Raises UserError if images, encoders, buckets, model and store do not fit together, the disk cannot be written, a
    worker dies, or every image was skipped.
    """
    began = time.perf_counter()
    root = run.data.features
    if root is None:
        raise UserError("strategy.features is online: each step encodes, and nothing is extracted; set it to cached")
    if url_of(root) is not None:
        raise UserError(
            f"data.features: extraction cannot write to {url_of(root)}; extract into a folder, and copy it there"
        )
    if problems := condition_problems(run, model):
        raise UserError(*problems)
    source = open_source(run.data)
    parse_split(len(source), start, end, shard)  # before the encoders are loaded
    schema = _prepare(run, model, source, by_content)
    first, last = parse_split(schema.count, start, end, shard)
    chosen = None if only is None else tuple(only)
    job = Job(run.data, run.encoders, schema, (first, last), chosen, workers or run.data.workers, Path.cwd())
    missing_parts = job.left()
    if missing_parts:
        (engine or encode_here)(job, numbered(root, schema, source))
    if (text := run.encoders.text) is not None:
        null = lambda: load_text_encoder(text, references=run.data.references).null()  # noqa: E731
        with own_folder(root) as folder:  # a worker wrote it, unless no part was missing
            write_null_text(root, null, store_identity(schema), folder)
    whole = not missing(root, schema.ranges())
    if whole and schema == latest_schema(root):
        commit_growth(root, schema)
        remove_old_listings(root, schema)
    store = _report_store(root, schema, changed=bool(missing_parts)) if whole else None
    return extract_report(root, missing_parts, time.perf_counter() - began, store)


def _prepare(run: RunConfig, model: ModelSpec, source: SourceList, by_content: bool) -> StoreSchema:
    """Load the encoders for their identities, check that everything fits together, and claim the store.

    Returns its schema, with the changes of the sources.
    """
    codec, text = load_image_codec(run.encoders.image), run.encoders.text
    text_encoder = None if text is None else load_text_encoder(text, references=run.data.references)
    first = run.encoders.first_frame
    first_frame = None if first is None else FirstFrames(first, codec, torch.device("cpu")).identity
    classes = (source.class_names or class_count(model)) if takes_classes(model) else None
    fill = fill_channels(codec.channels, codec.downsample) if run.data.fill else 0
    if problems := encoder_misfits(run, model, codec, text_encoder, classes, first_frame, fill):
        raise UserError(*problems)
    schema = StoreSchema(
        codec=codec.identity,
        text_encoder=text_encoder.identity if text_encoder else {},
        buckets=list(run.data.buckets),
        sources=source.identity["sources"],
        part_size=run.data.part_size,
        classes=classes,
        fps=run.data.fps,
        first_frame=first_frame,
        references=run.data.references,
        min_references=run.data.min_references,
        fill=fill,
    )
    root = run.data.store
    remove_left(root)
    if (found := latest_schema(root)) is None:
        claim(root, schema)
        write_listings(root, schema, source)
        return schema
    grown, lines = grow(root, found, schema, source, by_content=by_content)
    for line in lines:
        log.notice(line)
    return grown


def _report_store(root: Path, schema: StoreSchema, *, changed: bool) -> StoreReport:
    """The report of a complete store. Writes its file if parts `changed`. Raises UserError if no image is usable."""
    report = store_report(root, schema)
    if changed or not (root / REPORT).exists():
        with own_folder(root) as folder:
            # pydantic cannot write paths that are not UTF-8, and json can.
            write_text(root / REPORT, json.dumps(report.model_dump(mode="json"), indent=2) + "\n", folder)
    if not report.encoded:
        first = report.skipped[0]
        # If classes have no names, labels of a table must be numbers.
        names = ", or name the classes in data.classes" if isinstance(schema.classes, int) else ""
        raise UserError(
            f"data.images: none of {report.images} images can be used, the first {first.name}: "
            f"{first.reason}; fix them{names}, delete {root}, and run again"
        )
    return report


def split(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    """The ranges that start in [start, end). If splits cover the sources, each range is in exactly one."""
    return [each for each in ranges if start <= each[0] < end]


def parse_split(count: int, start: int | None, end: int | None, shard: str | None) -> Range:
    """The source indices [start, end) that `--start-index`, `--end-index` or `--shard k/n` select of `count` images.

    Raises UserError if they contradict one another or select nothing.
    """
    if shard is not None:
        if start is not None or end is not None:
            raise UserError("--shard cannot be combined with --start-index or --end-index")
        found = re.fullmatch(r"(\d+)/(\d+)", shard)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(f"--shard: {shard} is not k/n with k from 1 to n, such as 1/4 to 4/4")
        k, n = int(found[1]), int(found[2])
        return count * (k - 1) // n, count * k // n
    first, last = start or 0, count if end is None else end
    if not 0 <= first < count:
        raise UserError(f"--start-index: {first} is out of range; the sources hold 0 to {count - 1}")
    if last <= first:
        raise UserError(f"--end-index: {last} must be greater than --start-index, which is {first}")
    return first, last


def encode_here(job: Job, source: Items) -> None:
    """Encode the missing parts of a job in processes of this machine, with a progress bar on stderr.

    Other machines may run the same job. Parts that they commit are not encoded again. All processes have ended when
    this returns or raises. Raises UserError if a worker reports one or dies, and RuntimeError with the traceback of a
    bug in a worker.
    """
    root, ranges = job.data.store, job.left()
    units = (Unit(start, end, source.items(start, end)) for start, end in pull(root, ranges, random.Random()))
    workers: list[Worker] = []
    done: list[UnitSpeed] = []
    noted: set[str] = set()
    with log.progress("extract", total=sum(end - start for start, end in ranges), unit=job.data.samples) as advance:
        try:
            for number in range(min(job.workers, len(ranges))):
                workers.append(_start(number, job))
            while at_work := {worker.pipe: worker for worker in workers if not worker.finished}:
                for pipe in wait(list(at_work)):
                    progress = _receive(at_work[pipe], units, done, noted)  # type: ignore[index]  # wait() returns some
                    advance(progress.images, shares_of(done).at_work() if done else "", progress.skipped)
        finally:
            for worker in workers:
                if not worker.finished:  # its unit is incomplete; its lease is removed below
                    worker.process.terminate()
                worker.pipe.close()
            for worker in workers:
                worker.process.join()
            remove_left(root)


_NOTHING = Progress(0, 0)


@dataclass
class Worker:
    """One process, the parent's end of its pipe, its current unit, and whether it has finished."""

    number: int
    process: ForkServerProcess
    pipe: Connection
    unit: Unit | None = None
    finished: bool = False


def _start(number: int, job: Job) -> Worker:
    context = server()
    ours, theirs = context.Pipe()
    process = context.Process(
        target=work,
        args=(theirs, number, job.encoders, job.schema, job.data.store),
        name=f"extract-{number}",
        daemon=True,
    )
    try:
        process.start()
    except (EOFError, OSError) as error:  # click would take an EOFError for Ctrl-D
        raise UserError(
            f"extraction worker {number} could not be started: the process that starts workers was killed, or cannot "
            f"start one ({error}); {EXTRACT} resumes from the finished parts"
        ) from None
    theirs.close()  # now only the worker has this end, so its death closes the pipe
    return Worker(number, process, ours)


def _receive(worker: Worker, units: Iterator[Unit], done: list[UnitSpeed], noted: set[str]) -> Progress:
    """Receive one message of a worker, and return its progress."""
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
    """The error for a worker that died: it was killed, perhaps for lack of memory, or crashed in native code."""
    worker.process.join()
    status = worker.process.exitcode or 0
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    where = f" at images {worker.unit.start} to {worker.unit.end - 1}" if worker.unit else ""
    memory = " (if memory ran out: fewer --workers)" if status == -signal.SIGKILL else ""
    return UserError(f"extraction worker {worker.number} {how}{where}{memory}; {EXTRACT} resumes from the parts done")
