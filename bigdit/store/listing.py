"""The listings of a store, one for each source: names, sizes and times of its files, and the indices of their images.

A listing can be deleted at any time. Then all files are read.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from bigdit.files import replacing
from bigdit.sources.open import INDEX, SourceList
from bigdit.sources.protocol import Entry, Source
from bigdit.store.lease import own_folder
from bigdit.store.schema import StoreSchema

Ints = npt.NDArray[np.int64]


_DAMAGED = OSError, EOFError, ValueError, zlib.error


_LINE = TypeAdapter(
    tuple[str, int, str, str, str] | tuple[str, int, str, str, str, list[tuple[int, int]]], config={"strict": True}
)


def write_listings(root: Path, schema: StoreSchema, source: SourceList) -> None:
    """Write the listings of a new store."""
    ends = schema.ends()
    for number, inner in enumerate(source.sources):
        write_listing(root, schema, number, inner, np.arange(ends[number] - len(inner), ends[number]))


def remove_old_listings(root: Path, schema: StoreSchema) -> None:
    """Remove the listings from before the last change of the store."""
    kept = {listing_path(root, schema, number).name for number in range(len(schema.current))}
    for path in (root / INDEX).glob("source-*.jsonl.gz"):
        if path.name not in kept:
            path.unlink(missing_ok=True)


def live_indices(schema: StoreSchema, number: int) -> Ints:
    """The indices of a source's images in the store that are not gone, sorted."""
    ends, owners = schema.ends(), schema.owners
    segments = zip([0, *ends], ends, owners, strict=False)
    live = np.zeros(schema.count, bool)
    for start, end, owner in segments:
        live[start:end] = owner == number
    for start, end, _ in schema.gone():
        live[start:end] = False
    return np.flatnonzero(live)


Listed = tuple[Entry, Ints]
"""A file of a source, and the indices of its images in the store."""


def listing_path(root: Path, schema: StoreSchema, number: int) -> Path:
    """The listing of a source after the last change."""
    changes = f".{len(schema.changes)}" if schema.changes else ""
    return root / INDEX / f"source-{number}{changes}.jsonl.gz"


def with_indices(entries: Iterable[Entry], indices: Ints) -> Iterator[Listed]:
    at = 0
    for entry in entries:
        yield entry, indices[at : at + entry.count]
        at += entry.count


def keyed(listed: Iterable[Listed]) -> Iterator[tuple[tuple[str, int], Listed]]:
    """Files with unique keys, since files of several folders may have the same name."""
    seen: Counter[str] = Counter()
    for entry, indices in listed:
        yield (entry.name, seen[entry.name]), (entry, indices)
        seen[entry.name] += 1


def indices_of(listed: Iterable[Listed]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *(indices for _, indices in listed)])


def is_current(path: Path, inner: Source) -> bool:
    """Whether a listing has the files of a source, with the same sizes and times."""
    now = (json.dumps(astuple(entry)).removesuffix("]") for entry in inner.entries())
    with contextlib.suppress(*_DAMAGED), gzip.open(path, "rt") as file:
        return all(
            line.startswith((f"{entry}]", f"{entry}, "))
            for line, entry in itertools.zip_longest(file, now, fillvalue="\0")
        )
    return False


def write_listing(root: Path, schema: StoreSchema, number: int, inner: Source, indices: Ints) -> None:
    """Write the listing of a source. Once a store has changed, each file has runs [first index, number of indices]."""
    path = listing_path(root, schema, number)
    with own_folder(root) as own, replacing(path, own) as new, gzip.open(new, "wt", compresslevel=1) as file:
        for entry, here in with_indices(inner.entries(), indices):
            runs = [_in_runs(here)] if schema.changes else []
            file.write(json.dumps([*astuple(entry), *runs]) + "\n")


def _in_runs(indices: Ints) -> list[tuple[int, int]]:
    """Runs (first index, number of indices)."""
    if len(indices) == 1:  # most files are one image, and numpy would take seconds for a million
        return [(int(indices[0]), 1)]
    runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return [(int(run[0]), len(run)) for run in runs if len(run)]


def read_listing(root: Path, schema: StoreSchema, number: int) -> list[Listed] | None:
    """The files of a listing; None if it is missing, damaged, or lists other images."""
    live, listed, runs = live_indices(schema, number), list[Entry](), list[tuple[int, int]]()
    with contextlib.suppress(*_DAMAGED), gzip.open(listing_path(root, schema, number), "rt") as file:
        for line in file:
            fields = _LINE.validate_json(line)
            listed.append(Entry(*fields[:5]))
            runs += fields[5] if len(fields) == 6 else []
        counts = [entry.count for entry in listed]
        if sum(counts) != len(live) or min(counts) < 0 or any(count < 0 for _, count in runs):
            return None
        if not runs:
            return list(with_indices(listed, live))
        if sum(count for _, count in runs) != len(live):
            return None
        indices = np.concatenate([np.arange(start, start + count) for start, count in runs])
        if np.array_equal(np.sort(indices), live):
            return list(with_indices(listed, indices))
    return None
