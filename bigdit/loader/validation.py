"""Samples that training never sees: a pure function of where they lie in the store, and of no seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from bigdit.store.part import shape_name
from bigdit.store.store import Index

_Ints = npt.NDArray[np.int64]

_PARTS_AT_ONCE = 4096
"""A million samples of parts of 256: the digests of all of a large store would take more memory than its index."""


class Held(NamedTuple):
    """Samples of the bucket numbered `bucket`: int64 `parts`, their `rows`, and a seed each."""

    bucket: int
    parts: _Ints
    rows: _Ints
    seeds: tuple[int, ...]


class ValidationSplit:
    """The `samples` of the store's first `parts` parts whose digests are the least, and what is left to train on.

    A digest is of the part's place in the source, the bucket's shape and the row: parts that are added later, other
    buckets, and the number of processes change none.
    """

    def __init__(self, index: Index, parts: int, samples: int) -> None:
        chosen = _least(index, parts, samples)
        self.counts = np.zeros_like(index.counts)
        np.add.at(self.counts, (chosen["part"], chosen["bucket"]), 1)
        self.chosen = [
            Held(bucket, here["part"], here["row"], tuple((here["digest"] >> 1).tolist()))
            for bucket in range(len(index.shapes))
            if len(here := chosen[chosen["bucket"] == bucket])
        ]
        self._of_bucket = {each.bucket: each for each in self.chosen}

    def passed_over(self, bucket: int, parts: _Ints, rows: _Ints) -> _Ints:
        """Rows of parts, counted over those that are not held out, as they are counted over all."""
        if bucket not in self._of_bucket:
            return rows
        held, found = self._of_bucket[bucket], rows.copy()
        for part in np.intersect1d(parts, held.parts):
            out, here = held.rows[held.parts == part], parts == part
            found[here] += np.searchsorted(out - np.arange(len(out)), rows[here], "right")
        return found


_SAMPLE = np.dtype([("bucket", "i8"), ("part", "i8"), ("row", "i8"), ("digest", "u8")])


def _least(index: Index, parts: int, samples: int) -> npt.NDArray[np.void]:
    """The samples of the least digests, by bucket, part and row."""
    least = np.empty(0, _SAMPLE)
    for found in _digested(index, parts):
        least = np.concatenate([least, found])
        if len(least) > samples:
            least = least[np.argpartition(least["digest"], samples - 1)[:samples]]
    return np.sort(least, order=("bucket", "part", "row"))


def _digested(index: Index, parts: int) -> Iterator[npt.NDArray[np.void]]:
    """All samples of the first parts, some parts at a time."""
    for bucket, shape in enumerate(index.shapes):
        name = np.uint64(xxhash.xxh3_64_intdigest(shape_name(shape).encode()))
        for first in range(0, parts, _PARTS_AT_ONCE):
            numbers = np.arange(first, min(first + _PARTS_AT_ONCE, parts))
            counts = index.counts[numbers, bucket]
            found = np.empty(int(counts.sum()), _SAMPLE)
            found["bucket"], found["part"] = bucket, np.repeat(numbers, counts)
            found["row"] = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
            starts = index.parts[found["part"], 0].astype(np.uint64)
            found["digest"] = _mixed(_mixed(starts ^ name) + found["row"].astype(np.uint64))
            yield found


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """64 bits from 64 bits, all of which depend on all: a bijection.

    Source: SplitMix64's; Steele, Lea & Flood, Fast splittable pseudorandom number generators (OOPSLA 2014), figure 16.
    """
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
