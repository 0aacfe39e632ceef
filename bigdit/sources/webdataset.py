"""WebDataset tars: samples read at their offsets, by an index that is made once."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from PIL import Image

from bigdit import log
from bigdit.config.data import MAX_PIXELS
from bigdit.die_with_parent import end_with_parent
from bigdit.errors import UserError
from bigdit.files import replacing, write_text
from bigdit.sources import parquet_file
from bigdit.sources.captions import json_captions, text_captions
from bigdit.sources.disk import CAPTION_BYTES, PICTURE_BYTES, check_size, opened_range, read_range, sampled_digest
from bigdit.sources.labels import Label, json_label
from bigdit.sources.picture import SUFFIXES
from bigdit.sources.protocol import Caption, Contents, Entry, Readable, Unusable
from bigdit.sources.tar_members import Member, Refused, members
from bigdit.sources.videos.animation import contents_of
from bigdit.sources.videos.resample import Clip
from bigdit.sources.videos.video import SUFFIXES as VIDEOS
from bigdit.sources.videos.video import decoded_frames

ROWS = 1024  # of an index, decoded at a time
TARS_A_WORKER = 8  # a process takes seconds to start, and a tar of ten thousand members half of one

Span = tuple[int, int] | None  # offset and size of a member


@dataclass(frozen=True)
class TarItem(Readable):
    """A sample of a tar: where its picture or its video and its captions are; `label`: the key of its `.json` that
    holds its class, and then captions are not read; `clip`: what of videos is taken."""

    index: int
    name: str
    tar: Path
    problem: str | None
    picture: Span
    json: Span
    txt: Span
    label: str | None = None
    video: Span = None
    clip: Clip | None = None

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read; where videos are taken, of a sample that has both its video."""
        if self.problem is not None or (self.picture is None and (self.video is None or self.clip is None)):
            raise Unusable(self.problem or ("sample of a video, without a picture" if self.video else "empty sample"))
        label = None if self.label is None else self._label(self.label)
        captions = self._captions() if self.label is None else ()
        if self.clip is not None and self.video is not None:
            digest = partial(sampled_digest, self.tar, *self.video)
            return Contents(partial(self._frames, self.video, self.clip, max_pixels), digest, captions, label)
        assert self.picture is not None
        data = self._read(self.picture, "picture", PICTURE_BYTES)
        return contents_of(data, self.clip, max_pixels, captions, label)

    def _frames(self, video: tuple[int, int], clip: Clip, max_pixels: int) -> Iterator[Image.Image]:
        with opened_range(self.tar, *video) as file:
            yield from decoded_frames(file, self.name, clip, max_pixels)

    def _label(self, key: str) -> Label:
        name = f"{self.name.rpartition('/')[2]}.json"
        if self.json is None:
            raise Unusable(f"label {name} is missing")
        return json_label(self._read(self.json, name, CAPTION_BYTES), key, name)

    def _captions(self) -> tuple[Caption, ...]:
        """Of the `.json` where it has captions, else of the `.txt`."""
        stem = self.name.rpartition("/")[2]
        found = None
        if self.json is not None:
            found = json_captions(self._read(self.json, f"{stem}.json", CAPTION_BYTES), f"{stem}.json")
        if found is not None:
            return found
        if self.txt is None:
            raise Unusable(f"caption {stem}.txt is missing")
        return text_captions(self._read(self.txt, f"{stem}.txt", CAPTION_BYTES), f"{stem}.txt")

    def _read(self, span: tuple[int, int], name: str, limit: int) -> bytes:
        check_size(name, span[1], limit)
        return read_range(self.tar, *span)


class WebDataset:
    """The samples of tars, in the order of the tars given; indices are kept in the folder `kept`."""

    class_names: Collection[str] = ()

    def __init__(
        self,
        tars: Sequence[Path],
        kept: Path,
        workers: int,
        key: str,
        label: str | None = None,
        clip: Clip | None = None,
    ) -> None:
        """Index what is not indexed yet, in `workers` processes; of videos the `clip` is taken, where there is one.
        Raises UserError, which names `key`, for tars that are refused, all of them at once, and where there are no
        samples."""
        self._tars, self._label, self._clip = list(tars), label, clip
        try:
            self._indices = [index_path(tar, kept) for tar in self._tars]
        except OSError as error:
            raise UserError(f"{key}: {error.filename} cannot be read: {error.strerror}") from None
        missing = [pair for pair in zip(self._tars, self._indices, strict=True) if not is_whole(pair[1])]
        problems = [
            f"{key}: {problem}; make it anew, or leave it out" for problem in _index(missing, workers) if problem
        ]
        if problems:
            raise UserError(*problems)
        digest = xxhash.xxh3_128(b"" if label is None else f"label {label}\n".encode())
        counts = []
        self._entries: list[Entry] = []
        for tar, index in zip(self._tars, self._indices, strict=True):
            count, members = read_digest(index)
            counts.append(count)
            self._entries.append(Entry(tar.name, count, members, "", str(tar.stat().st_mtime_ns)))
            digest.update(f"{tar.name} {members}\n".encode("utf-8", "surrogateescape"))
        self._ends = list(itertools.accumulate(counts))
        if not len(self):
            raise UserError(f"{key}: the tars hold no samples, such as 000.jpg with 000.txt or 000.json")
        self.identity = {"kind": "webdataset", "count": len(self), "digest": digest.hexdigest()}

    def __len__(self) -> int:
        return self._ends[-1]

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return iter(self._entries)

    def items(self, start: int, end: int) -> list[TarItem]:
        """Samples [start, end)."""
        found: list[TarItem] = []
        while start < min(end, len(self)):
            number = bisect.bisect_right(self._ends, start)
            first = self._ends[number - 1] if number else 0
            last = min(end, self._ends[number])
            rows = parquet_file.read(self._indices[number], start - first, last - first, SCHEMA.names, ROWS)
            tar = self._tars[number]
            found += [
                _item(index, tar, row, self._label, self._clip) for index, row in enumerate(rows.to_pylist(), start)
            ]
            start = last
        return found


def _item(index: int, tar: Path, row: dict, label: str | None, clip: Clip | None) -> TarItem:
    def span(role: str) -> Span:
        return None if row[f"{role}_offset"] is None else (row[f"{role}_offset"], row[f"{role}_size"])

    name = f"{tar.name}/{row['name']}"
    picture, json, txt, video = map(span, ("picture", "json", "txt", "video"))
    return TarItem(index, name, tar, row["problem"], picture, json, txt, label, video, clip)


def _index(missing: Sequence[tuple[Path, Path]], workers: int) -> Iterator[str | None]:
    """Index tars behind a progress bar; for each, why it is refused, or None."""
    if not missing:
        return
    with log.progress("index", total=len(missing), unit="tars") as advance:
        for problem in _mapped(_index_one, missing, workers):
            advance(1)
            yield problem


def _mapped(
    function: Callable[[tuple[Path, Path]], str | None], pairs: Sequence[tuple[Path, Path]], workers: int
) -> Iterator[str | None]:
    """In processes, since headers are read by Python; workers of a pool may have none of their own."""
    workers = 1 if multiprocessing.current_process().daemon else min(workers, len(pairs) // TARS_A_WORKER)
    if workers <= 1:
        yield from map(function, pairs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        yield from pool.map(function, pairs)


def _index_one(pair: tuple[Path, Path]) -> str | None:
    tar, index = pair
    try:
        write_index(tar, index)
    except Refused as error:
        return f"{tar} {error}"
    return None


VERSION = 2
SAMPLES = 4096  # written at a time
ROLES = ("picture", "video", "json", "txt")
SCHEMA = pa.schema(
    [("name", pa.string()), ("problem", pa.string())]
    + [(f"{role}_{what}", pa.int64()) for role in ROLES for what in ("offset", "size")]
)


def index_path(tar: Path, folder: Path) -> Path:
    """Where the index of a tar is kept; another one when the tar changes its place, size or time."""
    status = tar.stat()
    key = os.fsencode(f"{VERSION} {tar.absolute()} {status.st_size} {status.st_mtime_ns}")
    return folder / f"{tar.stem}-{xxhash.xxh3_64_hexdigest(key)}.parquet"


def write_index(tar: Path, index: Path) -> None:
    """Index a tar. Raises Refused as `members`; UserError where the index cannot be written."""
    digest = xxhash.xxh3_128()
    samples = _samples(_digested(members(tar), digest))
    with replacing(index) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        while rows := list(itertools.islice(samples, SAMPLES)):
            writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
        writer.add_key_value_metadata({"members": digest.hexdigest()})
    write_text(_digest_path(index), _digest_of(index))


def is_whole(index: Path) -> bool:
    """Whether an index is there, and is as it was written."""
    try:
        return _digest_path(index).read_bytes() == _digest_of(index).encode()
    except OSError:
        return False


def read_digest(index: Path) -> tuple[int, str]:
    """Samples of an indexed tar, and the digest of its members' names, offsets and sizes."""
    metadata = pq.read_metadata(index)
    return metadata.num_rows, (metadata.metadata or {})[b"members"].decode()


def _digest_path(index: Path) -> Path:
    return index.with_suffix(".xxh3")


def _digest_of(index: Path) -> str:
    with index.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _digested(found: Iterator[Member], digest: xxhash.xxh3_128) -> Iterator[Member]:
    for member in found:
        digest.update(f"{member.name}\0{member.offset}\0{member.size}\n".encode())
        yield member


def _samples(found: Iterator[Member]) -> Iterator[dict[str, str | int | None]]:
    """Neighbours that share a name up to its first dot are one sample, as WebDataset has it. Members without such a
    name, or hidden ones, belong to none."""
    for key, group in itertools.groupby(found, lambda member: _split(member.name)[0]):
        if key is not None:
            yield _sample(key, list(group))


def _split(name: str) -> tuple[str | None, str]:
    """`a/b` and `seg.png` of `a/b.seg.png`."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return (folder + slash + stem if stem and dot else None), suffix.lower()


def _sample(key: str, group: list[Member]) -> dict[str, str | int | None]:
    row: dict[str, str | int | None] = {"name": key, "problem": None}
    suffixes = [_split(member.name)[1] for member in group]
    pictures = [suffix for suffix in suffixes if f".{suffix}" in SUFFIXES]
    videos = [suffix for suffix in suffixes if f".{suffix}" in VIDEOS]
    for kind, found, least in (("pictures", pictures, 0 if videos else 1), ("videos", videos, 0)):
        if not least <= len(found) <= 1:
            row["problem"] = f"sample of {len(found)} {kind} among {', '.join(suffixes)[:200]}, not of one"
    for member, suffix in zip(group, suffixes, strict=True):
        role = "picture" if suffix in pictures else "video" if suffix in videos else suffix
        if role in ROLES:
            row[f"{role}_offset"], row[f"{role}_size"] = member.offset, member.size
    return row
