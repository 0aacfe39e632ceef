"""Checks every byte of a store against its digests, in processes of this machine, and names damaged parts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from bigdit import log
from bigdit.config.check import no_store
from bigdit.errors import UserError, nearest
from bigdit.processes import end_with_parent
from bigdit.store.files import LocalParts, url_of
from bigdit.store.lease import missing
from bigdit.store.part import Shape, part_name, part_path
from bigdit.store.reader import Part
from bigdit.store.schema import EXTRACT, Range, StoreSchema, part_identity, read_schema, store_identity
from bigdit.store.store import INDEX, NULL_TEXT, counts_of, counts_problem, read_index, read_null_text
from bigdit.strategy import Strict
from bigdit.units import gib

_QUEUED = 64  # parts of each process, to bound memory


class Damaged(Strict):
    """A damaged file of the store. `start` and `end`: the source range of a part."""

    file: str
    start: int
    end: int
    problem: str


class VerifyReport(Strict):
    """How many parts were read, their bytes, the damaged files, and how many parts are missing."""

    features: Path
    parts: int
    bytes: int
    damaged: list[Damaged]
    missing: int
    seconds: float
    repaired: bool = False


def open_schema(root: Path) -> StoreSchema:
    """The schema of a store. Raises UserError if there is none."""
    if (url := url_of(root)) is not None:
        raise UserError(
            f"{url}: `bigdit features` reads folders of this machine; copy the cache, or run it where it lies"
        )
    if not root.exists():
        near = nearest(root.name, [each.name for each in root.absolute().parent.glob("*/")])
        hint = f"{near} " if near.startswith("did you mean") else ""
        raise UserError(f"{root}: there is no such folder; {hint}{EXTRACT} makes it")
    schema = read_schema(root)
    if schema is None:
        raise no_store(root)
    return schema


def verify(root: Path, workers: int = 1) -> VerifyReport:
    """Read all parts of the store at `root` in `workers` processes, with a progress bar on stderr.

    Raises UserError if there is no store.
    """
    began = time.perf_counter()
    schema = open_schema(root)
    ranges = schema.ranges()
    absent = set(missing(root, ranges))
    present = [each for each in ranges if each not in absent]
    damaged = _null_text_damage(root, store_identity(schema))
    total = 0
    with log.progress("verify", total=len(present), unit="parts") as advance:
        for nbytes, problems in _check_all(root, schema, present, workers):
            total += nbytes
            damaged += problems
            advance(1, f"{gib(total / max(time.perf_counter() - began, 1e-9))}/s")
    return VerifyReport(
        features=root,
        parts=len(present),
        bytes=total,
        damaged=sorted(damaged, key=lambda each: each.file),
        missing=len(absent),
        seconds=round(time.perf_counter() - began, 3),
    )


def _check_all(
    root: Path, schema: StoreSchema, ranges: Sequence[Range], workers: int
) -> Iterator[tuple[int, list[Damaged]]]:
    """The results of `_check` for each part, in any order. Raises UserError if a process was killed."""
    from bigdit.extract.worker import server  # its encoders take seconds to import, and `open_schema` needs none

    counts = _index_counts(root, store_identity(schema))
    try:
        with ProcessPoolExecutor(max(min(workers, len(ranges)), 1), server(), end_with_parent) as pool:
            for first in range(0, len(ranges), _QUEUED * workers):
                some = ranges[first : first + _QUEUED * workers]
                futures = [
                    pool.submit(_check, root, each, part_identity(schema, each[0]), counts.get(each)) for each in some
                ]
                yield from (each.result() for each in as_completed(futures))
    except BrokenProcessPool:
        raise UserError(
            f"a process that verified {root} was killed, perhaps for lack of memory, or crashed. Nothing was changed; "
            "verify again, with fewer --workers"
        ) from None


def _check(root: Path, each: Range, identity: str, counts: dict[Shape, int] | None) -> tuple[int, list[Damaged]]:
    """The bytes of a part, its first damage, and the damage of the index if its `counts` differ."""
    path, size, index_problem = part_path(root, *each), 0, None
    try:
        part = Part.open(path, identity=identity)
        problem = next(part.damages(), None)
        index_problem = None if counts is None else counts_problem(path, counts, part.counts)
        size = path.stat().st_size
    except UserError as error:
        problem = str(error)
    found = [(path.name, *each, problem), (INDEX, 0, 0, index_problem)]
    return size, [Damaged(file=file, start=start, end=end, problem=why) for file, start, end, why in found if why]


def _index_counts(root: Path, identity: str) -> dict[Range, dict[Shape, int]]:
    """The counts in the index, without parts whose size has changed since."""
    index = read_index(root / INDEX, identity)
    if index is None:
        return {}
    rows = enumerate(index.parts.tolist())
    sizes = LocalParts(root).sizes()
    return {
        (start, end): counts_of(index, row)
        for row, (start, end, size) in rows
        if sizes.get(part_name(start, end)) == size
    }


def _null_text_damage(root: Path, identity: str) -> list[Damaged]:
    try:
        if (root / NULL_TEXT).exists():
            read_null_text(root, identity)
    except UserError as error:
        return [Damaged(file=NULL_TEXT, start=0, end=0, problem=str(error))]
    return []
