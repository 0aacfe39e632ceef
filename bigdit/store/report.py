"""Reports: the contents of a store (`report.json` when it is complete), and the speed of workers (`speed/NAME.jsonl`).

Each worker appends a line for each unit to its own file, so files of several machines need no merging.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from bigdit.files import read_bytes
from bigdit.store.header import check_part, read_header
from bigdit.store.lease import Fate, WorkerName, all_leases, missing
from bigdit.store.part import Skipped, part_path, shape_name
from bigdit.store.reader import Part
from bigdit.store.schema import Known, Range, StoreSchema, part_identity
from bigdit.store.store import indices_of
from bigdit.store.text import Cut, Lengths, cut_line, joined_lengths, summed
from bigdit.strategy import Strict

FOLDER = "speed"


class UnitSpeed(Strict):
    """The seconds of one unit, the range [start, end).

    `seconds`: from the end of the unit before it until its features are encoded. They include reading and decoding
    images, encoding (`gpu_s` on a GPU) and waiting for the writer. `writing_s` overlaps with the next unit. `cpu_s`: of
    all cores. `queue_s`: the encoding thread waited for a free core. `skipped`: images that were not encoded.
    """

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
        """The number of encoded images."""
        return self.end - self.start - self.skipped


class Shares(Strict):
    """Shares of the workers' time: by activity, and by cores, GPU or neither.

    `io`: they waited for the disk. `queue`: they waited for a free core.
    """

    reading: float
    encoding: float
    waiting: float
    cpu: float
    gpu: float
    io: float
    queue: float

    def at_work(self) -> str:
        """The shares of cores, GPU and disk as text."""
        return f"CPU {self.cpu:.0%} GPU {self.gpu:.0%} IO {self.io:.0%}"


class WorkerSpeed(Strict):
    """The work of one worker, and its speed without its start."""

    worker: str
    device: str
    parts: int
    images: int
    seconds: float
    images_per_s: float
    shares: Shares


class Stopwatch:
    """Adds up the seconds of a unit by activity."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._queued = _queued_s()

    @contextlib.contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Count the time of the block as `what`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began

    def stop(self, start: int, end: int, skipped: int, device: str) -> UnitSpeed:
        """The speed of a unit, without its writing."""
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
    """The shares of units' time."""
    total = sum(unit.seconds for unit in units) or 1.0
    shares = {
        name: round(min(sum(getattr(unit, f"{name}_s") for unit in units) / total, 1.0), 3)
        for name in ("reading", "encoding", "waiting", "cpu", "gpu", "queue")
    }
    return Shares(io=round(max(1 - shares["cpu"] - shares["gpu"] - shares["queue"], 0.0), 3), **shares)


def _queued_s() -> float:
    """Seconds in which this thread could run, and no core was free; 0 if the kernel does not count them.

    Source: Linux, Documentation/scheduler/sched-stats.rst, the second number.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def append(root: Path, worker: str, unit: UnitSpeed) -> None:
    """Add a line to a worker's file. Ignores errors such as a full disk, since the store does not need it."""
    line = (unit.model_dump_json() + "\n").encode()
    with contextlib.suppress(OSError):
        (root / FOLDER).mkdir(exist_ok=True)
        descriptor = os.open(root / FOLDER / f"{worker}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def read_units(root: Path) -> dict[str, list[UnitSpeed]]:
    """The units of each worker that ever worked on the store, without cut lines and unreadable files."""
    found: dict[str, list[UnitSpeed]] = {}
    for file in sorted((root / FOLDER).glob("*.jsonl")):
        if WorkerName.parse(file.stem) is None:
            continue
        units = []
        try:
            lines = read_bytes(file).decode(errors="replace").splitlines()
        except OSError:  # for example a folder
            continue
        for line in lines:
            with contextlib.suppress(ValidationError):
                units.append(UnitSpeed.model_validate_json(line))
        if units:
            found[file.stem] = units
    return found


def worker_speed(worker: str, units: list[UnitSpeed]) -> WorkerSpeed:
    """The sum of a worker's units."""
    images, seconds = sum(unit.end - unit.start for unit in units), sum(unit.seconds for unit in units)
    return WorkerSpeed(
        worker=worker,
        device=units[-1].device,
        parts=len(units),
        images=images,
        seconds=round(seconds, 3),
        images_per_s=round(sum(unit.encoded for unit in units) / seconds, 2) if seconds else 0.0,
        shares=shares_of(units),
    )


FILE = "report.json"


class AtWork(Strict):
    """A worker with leased ranges. It may be dead, or on another machine."""

    worker: str
    fate: Fate
    parts: list[str]
    bytes: int


class CaptionLengths(Strict):
    """How many tokens of a tokenizer, which cuts them at `limit`, captions have. `longest_of`: a sample with the most.

    `quartiles`: a quarter, half and three quarters of the captions have at most so many tokens.
    """

    tokenizer: str
    limit: int
    captions: int
    shortest: int
    quartiles: tuple[int, int, int]
    longest: int
    longest_of: str

    @classmethod
    def of(cls, found: Lengths) -> CaptionLengths:
        """The summary of counted lengths."""
        tokens, counts = zip(*found.counts, strict=True)
        ends = list(itertools.accumulate(counts))
        first, half, third = (tokens[bisect.bisect_left(ends, ends[-1] * share / 4)] for share in (1, 2, 3))
        return cls(
            tokenizer=found.tokenizer,
            limit=found.limit,
            captions=ends[-1],
            shortest=tokens[0],
            quartiles=(first, half, third),
            longest=tokens[-1],
            longest_of=found.longest,
        )

    def line(self) -> str:
        """`captions have 4 to 51 tokens by tokenizer, at most 77 are kept; quartiles 9, 12, 20; the longest: d.png`."""
        quartiles = ", ".join(map(str, self.quartiles))
        return (
            f"captions have {self.shortest} to {self.longest} tokens by {self.tokenizer}, at most {self.limit} are "
            f"kept; quartiles {quartiles}; the longest: {self.longest_of}"
        )


class StoreReport(Strict):
    """The contents of a store: its parts, images, sources, encoders, classes and workers.

    Encoded images by shape of latents, skipped images, captions, cuts, lengths and bytes are those of finished parts.
    `gone`: images in parts that were removed from the sources, or edited. Only bytes, cuts and lengths include them.
    """

    features: Path
    parts_done: int
    parts: int
    images: int
    gone: int
    encoded: int
    buckets: dict[str, int]
    skipped: list[Skipped]
    captions: int
    cut: list[Cut]
    lengths: list[CaptionLengths] = []
    bytes: int
    bytes_by_column: dict[str, int]
    codec: dict[str, Any]
    text_encoder: dict[str, Any]
    classes: Known | None = None
    sources: list[dict[str, Any]]
    workers: list[WorkerSpeed]
    at_work: list[AtWork]


def caption_lines(report: StoreReport) -> list[str]:
    """Messages on the lengths of a store's captions, and on how many each tokenizer cut."""
    return [each.line() for each in report.lengths] + [cut_line(cut, report.captions) for cut in report.cut]


def written_report(root: Path) -> StoreReport | None:
    """The report that extraction wrote; None if it is missing, damaged or of an older version."""
    with contextlib.suppress(OSError, ValueError):
        return StoreReport.model_validate_json(read_bytes(root / FILE))
    return None


class ExtractReport(Strict):
    """The work of one extraction: parts, their images, and the workers. `store` is None unless it is complete."""

    features: Path
    parts: int
    images: int
    seconds: float
    images_per_s: float
    workers: list[WorkerSpeed]
    store: StoreReport | None


def store_report(root: Path, schema: StoreSchema) -> StoreReport:
    """The report of a store, from the headers of its parts. Raises UserError if one is damaged."""
    ranges = schema.ranges()
    absent = set(missing(root, ranges))
    present = [each for each in ranges if each not in absent]
    headers = [read_header(part_path(root, *each)) for each in present]
    for header, (start, _) in zip(headers, present, strict=True):
        check_part(header, part_identity(schema, start))
    buckets: Counter[str] = Counter()
    columns: Counter[str] = Counter()
    gone, captions = indices_of(schema.gone()), sum(header.columns["caption"].shape[0] for header in headers)
    for header, (start, end) in zip(headers, present, strict=True):
        buckets.update({shape_name(shape): count for shape, count in header.shapes().items()})
        if len(here := gone[slice(*np.searchsorted(gone, (start, end)))]):
            for shape, rows in Part.open(header.path).rows.items():
                rows = rows[np.isin(rows[:, 0], here)]
                buckets[shape_name(shape)] -= len(rows)
                captions -= int(rows[:, 2].sum())
        for name, column in header.columns.items():
            columns[name.partition("/")[0]] += column.nbytes
    gone_indices = set(gone.tolist())
    return StoreReport(
        features=root,
        parts_done=len(headers),
        parts=len(ranges),
        images=schema.count - len(gone),
        gone=len(gone),
        encoded=sum(buckets.values()),
        buckets={name: count for name, count in sorted(buckets.items()) if count},
        skipped=[item for header in headers for item in header.skipped() if item.index not in gone_indices],
        captions=captions - (sum(buckets.values()) if schema.editor.seen else 0),  # each image has a dropped one too
        cut=summed(cut for header in headers for cut in header.cuts()),
        lengths=[
            CaptionLengths.of(each) for each in joined_lengths(each for header in headers for each in header.lengths())
        ],
        bytes=sum(part_path(root, *each).stat().st_size for each in present),
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
    """The report on an extraction of `ranges`, which are all in the store now."""
    encoded = set(ranges)
    by_worker = {
        worker: [unit for unit in units if (unit.start, unit.end) in encoded]
        for worker, units in (read_units(root).items() if encoded else ())
    }
    skipped = {(unit.start, unit.end): unit.skipped for units in by_worker.values() for unit in units}
    images = sum(end - start for start, end in ranges)
    return ExtractReport(
        features=root,
        parts=len(ranges),
        images=images,
        seconds=round(seconds, 3),
        images_per_s=round((images - sum(skipped.values())) / seconds, 2),
        workers=[worker_speed(worker, units) for worker, units in by_worker.items() if units],
        store=store,
    )
