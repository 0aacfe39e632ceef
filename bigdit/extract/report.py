"""What a store holds, `report.json` when it is whole, and what an extraction did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigdit.extract import speed
from bigdit.extract.ranges import missing
from bigdit.extract.speed import WorkerSpeed
from bigdit.spec import Strict
from bigdit.store.classes import Known
from bigdit.store.header import check_part, read_header
from bigdit.store.in_hand import Fate, all_held
from bigdit.store.part import Skipped, part_path, shape_name
from bigdit.store.schema import Range, StoreSchema, part_identity
from bigdit.store.text import Cut, summed

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
        workers=[speed.worker_speed(worker, units) for worker, units in speed.read_units(root).items()],
        at_work=[
            AtWork(worker=str(held.worker), fate=held.fate, parts=list(held.marks), bytes=held.nbytes)
            for held in all_held(root)
            if held.marks
        ],
    )


def extract_report(root: Path, ranges: Sequence[Range], seconds: float, store: StoreReport | None) -> ExtractReport:
    """What was done of `ranges`, all of which are in the store now, by whom."""
    wanted = set(ranges)
    by_worker = {
        worker: [unit for unit in units if (unit.start, unit.end) in wanted]
        for worker, units in (speed.read_units(root).items() if wanted else ())
    }
    skipped = {(unit.start, unit.end): unit.skipped for units in by_worker.values() for unit in units}
    pictures = sum(end - start for start, end in ranges)
    return ExtractReport(
        features=root,
        parts=len(ranges),
        pictures=pictures,
        seconds=round(seconds, 3),
        images_per_s=round((pictures - sum(skipped.values())) / seconds, 2),
        workers=[speed.worker_speed(worker, units) for worker, units in by_worker.items() if units],
        store=store,
    )
