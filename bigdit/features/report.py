"""What an extraction did: `report.json` in the store."""

from __future__ import annotations

from pathlib import Path

from bigdit.features.header import read_header
from bigdit.features.part import Skipped, part_path, shape_name
from bigdit.features.pool import Worker
from bigdit.features.schema import StoreSchema
from bigdit.spec import Strict

FILE = "report.json"


class WorkerReport(Strict):
    """The share of one process in this run; speed without start-up, in pictures a second."""

    worker: int
    parts: int
    pictures: int
    images_per_s: float


class ExtractReport(Strict):
    """The whole store: pictures by latents' shape, and what was skipped. This run: `seconds`, and its workers,
    none where nothing was left to do."""

    features: Path
    pictures: int
    encoded: int
    buckets: dict[str, int]
    skipped: list[Skipped]
    seconds: float
    images_per_s: float
    workers: list[WorkerReport]


def make_report(root: Path, schema: StoreSchema, workers: list[Worker], seconds: float) -> ExtractReport:
    """Count the store by its parts' headers."""
    headers = [read_header(part_path(root, start, end)) for start, end in schema.ranges()]
    buckets: dict[str, int] = {}
    for header in headers:
        for shape, count in header.shapes().items():
            buckets[shape_name(shape)] = buckets.get(shape_name(shape), 0) + count
    return ExtractReport(
        features=root,
        pictures=int(schema.source["count"]),
        encoded=sum(buckets.values()),
        buckets=dict(sorted(buckets.items())),
        skipped=[item for header in headers for item in header.skipped()],
        seconds=round(seconds, 3),
        images_per_s=round(sum(worker.pictures for worker in workers) / seconds, 2),
        workers=[
            WorkerReport(
                worker=worker.number,
                parts=worker.parts,
                pictures=worker.pictures,
                images_per_s=round(worker.pictures / worker.seconds, 2) if worker.seconds else 0.0,
            )
            for worker in workers
        ],
    )
