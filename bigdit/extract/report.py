"""What a store holds (`report.json` when it is whole), what an extraction did, and how fast (`speed/NAME.jsonl`).

Each worker appends a line a unit to a file of its own, so that any number of them, on any number of machines, add up
unmerged.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigdit.extract.ranges import missing
from bigdit.files import read_bytes
from bigdit.store.header import check_part, read_header
from bigdit.store.lease import Fate, WorkerName, all_leases
from bigdit.store.part import Skipped, part_path, shape_name
from bigdit.store.schema import Known, Range, StoreSchema, part_identity
from bigdit.store.text import Cut, summed
from bigdit.strategy import Strict

FOLDER = "speed"


class UnitSpeed(Strict):
    """The unit of the range [start, end), in seconds: from the end of the one before it to its features, of which
    waiting for the writer, reading and decoding pictures, encoding (in `gpu_s` on a GPU); the writer's own, beside the
    next unit's; those of the process' cores, and those in which the encoding thread waited for a core to be free.
    `skipped`: pictures of the range that were not encoded."""

    start: int
    end: int
    device: str
    seconds: float
    reading_s: float
    encoding_s: float
    waiting_s: float
    writing_s: float
    cpu_s: float
    gpu_s: float
    queue_s: float
    skipped: int = 0

    @property
    def encoded(self) -> int:
        """Pictures that were not skipped."""
        return self.end - self.start - self.skipped


class Shares(Strict):
    """Of the workers' time: what they were at (the rest is theirs between), and what was at work: cores, a GPU, or
    neither, where they waited for the disk; `queue`: they waited for a core that others kept busy."""

    reading: float
    encoding: float
    waiting: float
    cpu: float
    gpu: float
    io: float
    queue: float

    def at_work(self) -> str:
        """Of cores, GPU and disk."""
        return f"CPU {self.cpu:.0%} GPU {self.gpu:.0%} IO {self.io:.0%}"


class WorkerSpeed(Strict):
    """What a worker did: speed without start-up, in pictures encoded a second."""

    worker: str
    device: str
    parts: int
    pictures: int
    seconds: float
    images_per_s: float
    shares: Shares


class Stopwatch:
    """Adds up the seconds of what a unit's time goes into."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._queued = _queued_s()

    @contextlib.contextmanager
    def at(self, what: str) -> Iterator[None]:
        """The time of the block goes into `what`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began

    def stop(self, start: int, end: int, skipped: int, device: str) -> UnitSpeed:
        """The speed of a unit, all but its writing."""
        encoding = self.seconds["encoding"]
        return UnitSpeed(
            start=start,
            end=end,
            skipped=skipped,
            device=device,
            seconds=time.perf_counter() - self._began,
            reading_s=self.seconds["reading"],
            encoding_s=encoding,
            waiting_s=self.seconds["waiting"],
            writing_s=0.0,
            cpu_s=time.process_time() - self._cpu,
            gpu_s=encoding if device.startswith("cuda") else 0.0,
            queue_s=_queued_s() - self._queued,
        )


def shares_of(units: list[UnitSpeed]) -> Shares:
    """What the time of units went into."""
    total = sum(unit.seconds for unit in units) or 1.0

    def share(name: str) -> float:
        return round(min(sum(getattr(unit, name) for unit in units) / total, 1.0), 3)

    cpu, gpu, queue = share("cpu_s"), share("gpu_s"), share("queue_s")
    return Shares(
        reading=share("reading_s"),
        encoding=share("encoding_s"),
        waiting=share("waiting_s"),
        cpu=cpu,
        gpu=gpu,
        io=round(max(1 - cpu - gpu - queue, 0.0), 3),
        queue=queue,
    )


def _queued_s() -> float:
    """Seconds that this thread was ready to run, and no core was free. Source: Linux, Documentation/scheduler/
    sched-stats.rst, the second number; 0 where the kernel does not keep it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def append(root: Path, worker: str, unit: UnitSpeed) -> None:
    """Add a line to a worker's file. It is no part of the store: where the disk is full it is left out."""
    line = (unit.model_dump_json() + "\n").encode()
    with contextlib.suppress(OSError):
        (root / FOLDER).mkdir(exist_ok=True)
        descriptor = os.open(root / FOLDER / f"{worker}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def read_units(root: Path) -> dict[str, list[UnitSpeed]]:
    """The units of each worker that ever worked on the store; lines that a crash has cut are left out, as are files
    that are named after no worker or cannot be read."""
    found: dict[str, list[UnitSpeed]] = {}
    for file in sorted((root / FOLDER).glob("*.jsonl")):
        if WorkerName.parse(file.stem) is None:
            continue
        units = []
        try:
            lines = read_bytes(file).decode(errors="replace").splitlines()
        except OSError:  # a folder, or what else is no file
            continue
        for line in lines:
            with contextlib.suppress(ValidationError):
                units.append(UnitSpeed.model_validate_json(line))
        if units:
            found[file.stem] = units
    return found


def worker_speed(worker: str, units: list[UnitSpeed]) -> WorkerSpeed:
    """The sum of a worker's units."""
    pictures, seconds = sum(unit.end - unit.start for unit in units), sum(unit.seconds for unit in units)
    return WorkerSpeed(
        worker=worker,
        device=units[-1].device,
        parts=len(units),
        pictures=pictures,
        seconds=round(seconds, 3),
        images_per_s=round(sum(unit.encoded for unit in units) / seconds, 2) if seconds else 0.0,
        shares=shares_of(units),
    )


FILE = "report.json"


class AtWork(Strict):
    """A worker that has ranges in hand, or left them: alive or dead on this machine, or on another."""

    worker: str
    fate: Fate
    parts: list[str]
    bytes: int


class StoreReport(Strict):
    """A store as it is: parts that are done of all, pictures of the sources, and of the parts that are done encoded
    pictures by latents' shape, what was skipped, their captions, and which of these tokenizers cut, bytes by column;
    encoders, or classes as in the schema; every worker that ever wrote a part."""

    features: Path
    parts_done: int
    parts: int
    pictures: int
    encoded: int
    buckets: dict[str, int]
    skipped: list[Skipped]
    captions: int
    cut: list[Cut]
    bytes: int
    bytes_by_column: dict[str, int]
    codec: dict[str, Any]
    text_encoder: dict[str, Any]
    classes: Known | None = None
    sources: list[dict[str, Any]]
    workers: list[WorkerSpeed]
    at_work: list[AtWork]


class ExtractReport(Strict):
    """What an extraction did: parts and their pictures, the workers that wrote them; `store` where it is whole."""

    features: Path
    parts: int
    pictures: int
    seconds: float
    images_per_s: float
    workers: list[WorkerSpeed]
    store: StoreReport | None


def store_report(root: Path, schema: StoreSchema) -> StoreReport:
    """Count the store by its parts' headers. Raises UserError where one is damaged."""
    ranges = schema.ranges()
    absent = set(missing(root, ranges))
    there = [each for each in ranges if each not in absent]
    headers = [read_header(part_path(root, *each)) for each in there]
    for header, (start, _) in zip(headers, there, strict=True):
        check_part(header, part_identity(schema, start))
    buckets: Counter[str] = Counter()
    columns: Counter[str] = Counter()
    for header in headers:
        buckets.update({shape_name(shape): count for shape, count in header.shapes().items()})
        for name, column in header.columns.items():
            columns[name.partition("/")[0]] += column.nbytes
    return StoreReport(
        features=root,
        parts_done=len(headers),
        parts=len(ranges),
        pictures=schema.count,
        encoded=sum(buckets.values()),
        buckets=dict(sorted(buckets.items())),
        skipped=[item for header in headers for item in header.skipped()],
        captions=sum(header.columns["caption"].shape[0] for header in headers),
        cut=summed(cut for header in headers for cut in header.cuts()),
        bytes=sum(part_path(root, *each).stat().st_size for each in there),
        bytes_by_column=dict(sorted(columns.items())),
        codec=schema.codec,
        text_encoder=schema.text_encoder,
        classes=schema.classes,
        sources=schema.sources,
        workers=[worker_speed(worker, units) for worker, units in read_units(root).items()],
        at_work=[
            AtWork(worker=str(lease.worker), fate=lease.fate, parts=list(lease.marks), bytes=lease.nbytes)
            for lease in all_leases(root)
            if lease.marks
        ],
    )


def extract_report(root: Path, ranges: Sequence[Range], seconds: float, store: StoreReport | None) -> ExtractReport:
    """What was done of `ranges`, all of which are in the store now, by whom."""
    wanted = set(ranges)
    by_worker = {
        worker: [unit for unit in units if (unit.start, unit.end) in wanted]
        for worker, units in (read_units(root).items() if wanted else ())
    }
    skipped = {(unit.start, unit.end): unit.skipped for units in by_worker.values() for unit in units}
    pictures = sum(end - start for start, end in ranges)
    return ExtractReport(
        features=root,
        parts=len(ranges),
        pictures=pictures,
        seconds=round(seconds, 3),
        images_per_s=round((pictures - sum(skipped.values())) / seconds, 2),
        workers=[worker_speed(worker, units) for worker, units in by_worker.items() if units],
        store=store,
    )
