"""The store for training: its index, the text of the empty caption, and rows, which are read at their offsets.

The index has the number of samples of each shape in every part, since to read a hundred thousand headers takes minutes
on a cold disk. It can be deleted at any time. Headers of parts that it lacks, or that have another size, are read
again. Each opened part is compared with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bigdit.catalog.families import FILL, LOSS_MASK, REFERENCE
from bigdit.config.check import no_store
from bigdit.errors import UserError
from bigdit.store.files import LocalParts, ReaderName, RemoteParts, open_remote, read_column
from bigdit.store.header import Header, check_part, damaged, read_header
from bigdit.store.part import (
    FIRST_FRAME,
    FRAME_COLUMNS,
    EditShape,
    Shape,
    parse_shape,
    part_name,
    part_range,
    shape_name,
)
from bigdit.store.reader import Part
from bigdit.store.schema import EXTRACT, GROWTH, Classes, Run, StoreSchema, part_identity, read_schema, store_identity
from bigdit.store.schema import FILE as SCHEMA
from bigdit.store.tensors import bytes_of, chained_digest, commit_tensors
from bigdit.store.text import TEXT, Text, column_name
from bigdit.units import GIB, how_many

INDEX = "index.safetensors"
_READERS = 8  # threads for headers: on a network, latency dominates


@dataclass(frozen=True)
class Index:
    """`parts` int64 [parts, 3]: source indices [start, end) and bytes. `counts` int64 [parts, shapes]: samples."""

    shapes: tuple[Shape, ...]
    parts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


def load_index(
    root: Path, wanted: npt.NDArray[np.int64], header_of: Callable[[str], Header], schema: StoreSchema
) -> Index:
    """The index of `wanted` parts (start, end, bytes). Parts that the index file lacks are read from their headers.

    Then the file is written again. Raises UserError if a header is damaged or belongs to another store.
    """
    identity = store_identity(schema)
    saved = read_index(root / INDEX, identity)
    if saved is not None and np.array_equal(saved.parts, wanted):
        return saved
    parts = [tuple(each) for each in wanted.tolist()]
    counts: list[dict[Shape, int]] = [{} for _ in parts]
    known = {} if saved is None else {tuple(each): row for row, each in enumerate(saved.parts.tolist())}
    new = [number for number, part in enumerate(parts) if part not in known]
    for number, part in enumerate(parts):
        if saved is not None and part in known:
            counts[number] = dict(zip(saved.shapes, saved.counts[known[part]].tolist(), strict=True))

    def shapes_of(number: int) -> dict[Shape, int]:
        start, end, _ = parts[number]
        header = header_of(part_name(start, end))
        check_part(header, part_identity(schema, start))
        return header.shapes()

    with ThreadPoolExecutor(_READERS, "index") as threads:
        for number, found in zip(new, threads.map(shapes_of, new), strict=True):
            counts[number] = found
    shapes = tuple(sorted(sorted({shape for each in counts for shape, count in each.items() if count}, key=shape_name)))
    table = np.array([[each.get(shape, 0) for shape in shapes] for each in counts], np.int64)
    index = Index(shapes, wanted, table.reshape(len(parts), len(shapes)))
    with contextlib.suppress(UserError):  # a read-only store can be read
        write_index(root / INDEX, index, identity)
    return index


def write_index(path: Path, index: Index, identity: str) -> None:
    """Commit the index to `path`. Raises UserError if it cannot be written."""
    parts, counts = torch.from_numpy(index.parts), torch.from_numpy(index.counts)
    digest = torch.tensor([chained_digest([bytes_of(parts), bytes_of(counts)])])
    shapes = ",".join(shape_name(shape) for shape in index.shapes)
    tensors = {"digest": digest, "part": parts, "count": counts}
    commit_tensors(path, tensors, {"shapes": shapes, "store": identity})


def counts_of(index: Index, number: int) -> dict[Shape, int]:
    """The samples of each shape in a part, according to the index."""
    return {shape: int(count) for shape, count in zip(index.shapes, index.counts[number], strict=True) if count}


def counts_problem(path: Path, counts: dict[Shape, int], rows: dict[Shape, int]) -> str | None:
    """The problem if the part at `path` has other rows than the index says."""
    if counts == {shape: count for shape, count in rows.items() if count}:
        return None
    return f"data.features: {path} has other rows than {path.parent / INDEX} says; delete that index; it is rebuilt"


def read_index(path: Path, identity: str) -> Index | None:
    """The index in a file; None if it is missing, damaged or belongs to another store."""
    if not path.exists():
        return None
    try:
        header = read_header(path)
        parts, counts = read_column(header, "part"), read_column(header, "count")
        names = header.metadata["shapes"].split(",") if header.metadata["shapes"] else []
        shapes = tuple(parse_shape(name) for name in names)
        if int(read_column(header, "digest")) != chained_digest([bytes_of(parts), bytes_of(counts)]):
            raise damaged(path, "is damaged")
        typed = parts.dtype == counts.dtype == torch.int64 and parts.shape[1:] == (3,)
        if header.metadata["store"] != identity or not typed or counts.shape != (len(parts), len(shapes)):
            return None
        if (counts < 0).any():
            raise damaged(path, "is damaged")
    except (UserError, KeyError, ValueError, RuntimeError):
        return None
    return Index(shapes, parts.numpy(), counts.numpy())


NULL_TEXT = "null_text.safetensors"


def write_null_text(root: Path, encode: Callable[[], Text], identity: str, workspace: Path | None = None) -> None:
    """Commit the text of the empty caption, in bf16, unless it exists. `identity`: `schema.store_identity`."""
    if (root / NULL_TEXT).exists():
        return
    stored = encode().to("cpu", torch.bfloat16)
    tensors = {"text": stored.states, "digest": torch.tensor([_digest(stored)])}
    if stored.pooled is not None:
        tensors["pooled"] = stored.pooled
    for name, each in stored.sequences.items():
        if name != TEXT:
            tensors[column_name("text", name)] = each.states
        if each.unmasked is not None:
            tensors[column_name("seen", name)] = torch.tensor([each.unmasked])
    commit_tensors(root / NULL_TEXT, tensors, {"store": identity}, workspace)


def read_null_text(root: Path, identity: str) -> Text:
    """The text of the empty caption, in bf16. Raises UserError if it is damaged or belongs to another store."""
    header = read_header(root / NULL_TEXT)
    streams = [name.partition("/")[2] for name in header.columns if name.startswith("text/")]
    pooled = read_column(header, "pooled") if "pooled" in header.columns else None
    text = replace(_sequence(header, TEXT), pooled=pooled, streams={name: _sequence(header, name) for name in streams})
    if int(read_column(header, "digest")) != _digest(text):
        raise damaged(header.path, "is damaged: its digest differs")
    if header.metadata.get("store") != identity:
        raise damaged(header.path, "belongs to another store: its encoders or buckets differ")
    return text


def _sequence(header: Header, name: str) -> Text:
    seen = column_name("seen", name)
    unmasked = int(read_column(header, seen)) if seen in header.columns else None
    return Text(read_column(header, column_name("text", name)), unmasked=unmasked)


def _digest(text: Text) -> int:
    """The digest of all values, the names of streams, and the numbers of states that masks show."""
    parts: list[memoryview | bytes] = [
        bytes_of(each.contiguous()) for each in (text.states, text.pooled) if each is not None
    ]
    for name, each in text.sequences.items():
        if name != TEXT:
            parts += [f"{name} {tuple(each.states.shape)}".encode(), bytes_of(each.states.contiguous())]
        if each.unmasked is not None:
            parts.append(str(each.unmasked).encode())
    return chained_digest(parts)


OPEN_PARTS = 256
"""The most open parts, with about 20 kB of tables each: a window of the order, and some of the window before it."""


class Rows(NamedTuple):
    """Rows of a store, all int64: the numbers of their buckets and parts, and their places in them."""

    buckets: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    @classmethod
    def joined(cls, *some: Rows) -> Rows:
        """All the rows."""
        return cls(*(np.concatenate(columns) for columns in zip(*some, strict=True)))


NO_ROWS = Rows(*(np.empty(0, np.int64) for _ in range(3)))


def indices_of(runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    """The indices in runs of `Change.gone`, sorted."""
    return np.unique(np.concatenate([NO_ROWS.rows, *(np.arange(start, end) for start, end, _ in runs)]))


class FeatureStore:
    """Latents, and text or classes, by bucket (C, H, W) and part. Open it with `FeatureStore.open`.

    `buckets`: how many samples each has.
    """

    def __init__(self, files: LocalParts | RemoteParts, schema: StoreSchema, index: Index) -> None:
        self.root = files.root
        self.schema = schema
        self.index = index
        self._files = files
        self.buckets = dict(zip(index.shapes, index.counts.sum(axis=0).tolist(), strict=True))
        self.part = functools.lru_cache(OPEN_PARTS)(self._open)
        self.gone = functools.cache(self._gone)

    @classmethod
    def open(cls, root: Path, reader: ReaderName = "pread", cache_bytes: int = 16 * GIB) -> FeatureStore:
        """Open the store in a folder, or at a URL, with a cache of at most `cache_bytes`.

        Raises UserError if parts are missing or damaged, or all are empty.
        """
        files = open_remote(root, cache_bytes) or LocalParts(root, reader)
        files.fetch((SCHEMA, INDEX, NULL_TEXT))
        schema = read_schema(files.root)
        if schema is None:
            raise no_store(files)
        ranges = schema.ranges()
        sizes = files.sizes()
        parts = np.empty((len(ranges), 3), np.int64)
        for number, (start, end) in enumerate(ranges):  # a list of a hundred thousand takes much memory
            parts[number] = start, end, sizes.get(part_name(start, end), -1)
        missing = [part_name(start, end) for start, end, size in parts[parts[:, 2] < 0].tolist()]
        others = sum(part_range(name) is not None for name in sizes) - (len(ranges) - len(missing))
        null_text = [NULL_TEXT] if schema.classes is None else []
        missing += [name for name in null_text if name not in sizes]
        growing = any(map(GROWTH.fullmatch, sizes))  # further parts are being added
        del sizes, ranges
        if missing:
            raise UserError(
                f"data.features: {files} lacks {len(missing)} of {how_many(len(parts) + len(null_text), 'file')}, the "
                f"first {missing[0]}; {EXTRACT} finishes it"
            )
        if others and not growing:
            raise UserError(
                f"data.features: {files} has {others} parts that are not among the {len(parts)} of its {SCHEMA}, which "
                "is damaged or outdated; restore the one that belongs to the parts"
            )
        index = load_index(files.root, parts, files.header, schema)
        if not index.counts.sum():
            raise UserError(f"data.features: all images of {files} were skipped; report.json there says why")
        store = cls(files, schema, index)
        if not store.counts.sum():
            raise UserError(f"data.features: all images of {files} were removed from their sources; add images")
        return store

    def _gone(self, changes: int) -> Rows:
        """The rows that the first `changes` of the store removed."""
        return self._rows(indices_of(self.schema.gone(changes)))

    @functools.cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """The samples of each shape in every part, int64 [parts, shapes], without those that are gone."""
        counts, gone = self.index.counts.copy(), self.gone(len(self.schema.changes))
        np.subtract.at(counts, (gone.parts, gone.buckets), 1)
        return counts

    def successors(self, rows: Rows, changes: int) -> Rows:
        """The rows that replaced `rows` in the first `changes` of the store."""
        places = zip(*(column.tolist() for column in rows), strict=True)
        shapes = self.index.shapes
        before = np.array([self.part(part).rows[shapes[bucket]][row, 0] for bucket, part, row in places], np.int64)
        found = [NO_ROWS.rows]
        for start, end, by in self.schema.gone(changes):
            here = np.concatenate([before, *found])
            if by >= 0:
                found.append(here[(here >= start) & (here < end)] - start + by)
        return self._rows(np.unique(np.concatenate(found)))

    def _rows(self, indices: npt.NDArray[np.int64]) -> Rows:
        """The rows of sorted indices. Skipped images have none."""
        found = [NO_ROWS]
        bounds = np.searchsorted(indices, self.index.parts[:, :2])
        for number in np.flatnonzero(bounds[:, 0] < bounds[:, 1]).tolist():
            here = indices[slice(*bounds[number])]
            for bucket, shape in enumerate(self.index.shapes):
                if self.index.counts[number, bucket]:
                    rows = np.flatnonzero(np.isin(self.part(number).rows[shape][:, 0], here))
                    found.append(Rows(np.full_like(rows, bucket), np.full_like(rows, number), rows))
        return Rows.joined(*found)

    @functools.cached_property
    def classes(self) -> Classes | None:
        """The classes, if images have no captions."""
        return None if self.schema.classes is None else Classes(self.schema.classes)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text, if images have captions."""
        return int(self.schema.text_encoder["max_tokens"])

    @property
    def text_shape(self) -> tuple[int, int] | None:
        """[max_tokens, dim] of a text; None if images have classes."""
        return None if self.classes else (self.max_tokens, self.null_text.states.shape[1])

    @property
    def text_shapes(self) -> dict[str, tuple[int, int]]:
        """[max_tokens, dim] of the text itself and of each stream; empty if images have classes."""
        if self.text_shape is None:
            return {}
        streams = self.schema.streams.items()
        return {TEXT: self.text_shape} | {name: (each["max_tokens"], each["dim"]) for name, each in streams}

    def frame_shapes(self, bucket: Shape) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of the columns of first frames, masks, references and masked images in a bucket."""
        found = self.schema.first_frame
        references = bucket.references if isinstance(bucket, EditShape) else self.schema.references
        more: dict[str, tuple[int, ...]] = {LOSS_MASK: bucket[-2:]} if self.schema.has_masks else {}
        more |= {REFERENCE: (references, *self.schema.editor.latents(bucket))} if references else {}
        more |= {FILL: (self.schema.fill, *bucket[-2:])} if self.schema.fill else {}
        if found is None:
            return more
        embeds = {FRAME_COLUMNS[1]: (int(found["tokens"]), int(found["dim"]))} if "dim" in found else {}
        return {FIRST_FRAME: bucket, **embeds, **more}

    @functools.cached_property
    def null_text(self) -> Text:
        """The text of the empty caption, in bf16, if images have captions."""
        found = read_null_text(self.root, store_identity(self.schema))
        if found.streams.keys() != self.schema.streams.keys():
            raise damaged(self.root / NULL_TEXT, "has other streams than its store")
        return found

    @functools.cached_property
    def latents_dtype(self) -> torch.dtype:
        """The dtype of stored latents."""
        return self._first.latents_dtype

    @functools.cached_property
    def has_deviation(self) -> bool:
        """Whether latents are stored as mean and standard deviation, and sampled at each read."""
        return any(self._first.has_deviation(shape) for shape in self._first.rows)

    @property
    def _first(self) -> Part:
        """A part that has rows. All parts have the same encoders."""
        return self.part(int(np.argmax(self.index.counts.any(axis=1))))

    def name_of(self, bucket: Shape, number: int, row: int) -> str:
        """A sample in words: its number in the source, its part and row."""
        part = self.part(number)
        index = int(part.rows[bucket][row, 0])
        return f"sample {index} (row {row} of {shape_name(bucket)} in {part.header.path.name})"

    def _open(self, number: int) -> Part:
        start, end, _ = self.index.parts[number].tolist()
        name = part_name(start, end)
        part = Part(self._files.header(name), self._files.open(name), part_identity(self.schema, start))
        if problem := counts_problem(part.header.path, counts_of(self.index, number), part.counts):
            raise UserError(problem)
        problem = _labels_problem(part, self.classes) or _streams_problem(part, self.schema)
        if problem := problem or _frames_problem(part, self.frame_shapes):
            raise damaged(part.header.path, problem)
        return part


def _labels_problem(part: Part, classes: Classes | None) -> str | None:
    """The problem if labels are missing, or of unknown classes."""
    if bool(part.labels) != (classes is not None) and part.rows:
        return f"has {'' if part.labels else 'no '}labels, unlike its store"
    if classes is not None and any((labels >= classes.count).any() for labels in part.labels.values()):
        return f"is damaged: it has labels beyond the {classes.count} classes of its store"
    return None


def _frames_problem(part: Part, expected: Callable[[Shape], dict[str, tuple[int, ...]]]) -> str | None:
    """The problem if the columns of first frames and masks are not those of the store. A part may have no masks."""
    for shape in part.rows:
        found, store = part.frame_shapes(shape), expected(shape)
        if found != {name: sides for name, sides in store.items() if name != LOSS_MASK or name in found}:
            return f"has {found or 'nothing'} of first frames, and its store {store or 'nothing'}"
    return None


def _streams_problem(part: Part, schema: StoreSchema) -> str | None:
    """The problem if captions have other streams than the store."""
    if len(part.captions) and set(part.streams) != schema.streams.keys():
        names = [" and ".join(sorted(each)) or "none" for each in (part.streams, schema.streams)]
        return f"has other streams of text than its store: {names[0]} instead of {names[1]}"
    return None
