"""The source that `data.images` describes: each of its list opened by its kind, and all of them one after another."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from bigdit.config.data import MAX_PIXELS, DataConfig, SourceConfig, SourceKind, frames_of
from bigdit.errors import UserError
from bigdit.sources.csv_rows import CsvRows
from bigdit.sources.file_rows import FileRows
from bigdit.sources.folder import ImageFolder
from bigdit.sources.labels import FOLDER
from bigdit.sources.places import SPLITS, STATE, files_of, is_pattern, kind_of, saved_files
from bigdit.sources.protocol import Contents, Entry, Item, Readable, Sample, Source
from bigdit.sources.rows import TableSource
from bigdit.sources.videos.clips import Clips
from bigdit.sources.videos.frame_folders import FrameFolders
from bigdit.sources.videos.resample import Clip
from bigdit.sources.webdataset import WebDataset

INDEX = "index"  # the folder within data.features where what is costly to list is kept


@dataclass(frozen=True)
class ListedItem(Readable):
    """An item of one source of the list, under its index in the whole list."""

    index: int
    name: str
    item: Item
    max_pixels: int = MAX_PIXELS

    def read(self, max_pixels: int | None = None) -> Contents:
        """As Item.read, of as many pixels as the run allows where nothing else is asked."""
        return self.item.read(max_pixels or self.max_pixels)

    def load(self, max_pixels: int | None = None) -> Sample:
        """Likewise."""
        return self.read(max_pixels).sample()


class SourceList:
    """Sources one after another. What is appended to the list leaves the indices before it as they were.

    `class_names`: of the classes 0, 1, … of its pictures, where they have names."""

    def __init__(
        self, sources: Sequence[Source], titles: Sequence[str], class_names: Sequence[str] | None, max_pixels: int
    ) -> None:
        self.sources = sources
        self._titles, self._max_pixels = titles, max_pixels
        known = {name for source in sources for name in source.class_names}
        self.class_names = sorted(known) if class_names is None else list(class_names)
        self._ends = list(itertools.accumulate(len(source) for source in sources))
        limit = {} if max_pixels == MAX_PIXELS else {"max_pixels": max_pixels}  # other images are skipped
        identities = [source.identity | limit for source in sources]
        digest = xxhash.xxh3_128_hexdigest("\n".join(identity["digest"] for identity in identities).encode())
        self.identity: dict[str, Any] = {
            "kind": "list",
            "count": self._ends[-1],
            "digest": digest,
            "sources": identities,
        }

    def __len__(self) -> int:
        return self._ends[-1]

    def entries(self) -> Iterator[Entry]:
        """Those of all sources."""
        return itertools.chain.from_iterable(source.entries() for source in self.sources)

    def items(self, start: int, end: int) -> list[ListedItem]:
        """Items [start, end) of the whole list; names start with their source where there are several."""
        found: list[ListedItem] = []
        for number in range(bisect.bisect_right(self._ends, start), len(self.sources)):
            first = self._ends[number - 1] if number else 0
            if first >= end:
                break
            prefix = f"{self._titles[number]}: " if len(self.sources) > 1 else ""
            inner = self.sources[number].items(max(start - first, 0), min(end, self._ends[number]) - first)
            found += [ListedItem(first + item.index, prefix + item.name, item, self._max_pixels) for item in inner]
        return found


def open_source(data: DataConfig) -> SourceList:
    """List what `data.images` names, without reading pictures.

    Raises UserError with all problems, each naming its source: what is missing, empty, damaged or hostile.
    """
    sources: list[Source] = []
    problems: list[str] = []
    for number, config in enumerate(data.images):
        try:
            sources.append(_clips(config, data, _key(data, number)))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return SourceList(sources, [str(config.path) for config in data.images], data.classes, data.max_pixels)


def check_sources(data: DataConfig, *, listed: bool) -> list[str]:
    """What of `data.images` is not there, and so was not looked at. Raises UserError where a source is asked for what
    its kind does not have, or, where all are there and to be `listed`, as open_source does; tars are not, since that
    writes an index."""
    kinds, missing, problems = set[SourceKind](), list[str](), list[str]()
    for number, config in enumerate(data.images):
        key, there = _key(data, number), config.path.exists() or is_pattern(config.path)
        missing += [] if there else [f"{key}: {config.path}"]
        if there or config.kind is not None:  # or its kind is not known
            try:
                kinds.add(_checked_kind(config, data, key))
            except UserError as error:
                problems += error.problems
    if problems:
        raise UserError(*problems)
    if listed and not missing and "webdataset" not in kinds:
        open_source(data)
    return missing


def _key(data: DataConfig, number: int) -> str:
    return "data.images" if len(data.images) == 1 else f"data.images[{number}]"


def _clips(config: SourceConfig, data: DataConfig, key: str) -> Source:
    clip = None if data.fps is None else Clip(data.fps, max(map(frames_of, data.buckets)))
    source = _open(config, data, key, clip)
    return source if clip is None or config.clips == 1 else Clips(source, config.clips, clip)


def _checked_kind(config: SourceConfig, data: DataConfig, key: str) -> SourceKind:
    kind = kind_of(config, key)
    _refuse_columns(config, kind, key)
    if config.frame_rate is not None and data.fps is None:
        raise UserError(f"{key}.frame_rate is of videos, and data.buckets has no frames; leave it out")
    if config.clips > 1 and data.fps is None:
        raise UserError(f"{key}.clips is of videos, and data.buckets has no frames; leave it out")
    return kind


def _open(config: SourceConfig, data: DataConfig, key: str, clip: Clip | None) -> Source:
    kind = _checked_kind(config, data, key)
    if kind == "folder":
        links, rate = config.follow_links, config.frame_rate
        if rate is None:
            return ImageFolder(config.path, key, follow_links=links, labelled=config.label is not None, clip=clip)
        assert clip is not None  # or its rate was refused
        return FrameFolders(config.path, key, frame_rate=rate, clip=clip, follow_links=links)
    if kind == "csv":
        return TableSource(kind, CsvRows(config.path, key), config, key, clip)
    if kind == "webdataset":
        if data.features is None:
            raise UserError(
                f"{key}: {config.path} holds tars, whose index is kept in data.features, and strategy.features is "
                "online; set it to cached, and `bigdit extract` encodes into data.features once"
            )
        tars = files_of(config, ".tar", key)
        return WebDataset(tars, data.features / INDEX, data.workers, key, config.label, clip)
    if kind == "datasets" and any((config.path / name).exists() for name in (STATE, SPLITS)):
        return TableSource(kind, FileRows(saved_files(config, key), "arrow", str(config.path), key), config, key, clip)
    return TableSource(
        kind, FileRows(files_of(config, ".parquet", key), "parquet", str(config.path), key), config, key, clip
    )


def _refuse_columns(config: SourceConfig, kind: SourceKind, key: str) -> None:
    """What the config could not see: whether the kind that the path shows has the columns and splits it names."""
    if kind in ("folder", "webdataset") and (config.image or config.captions):
        raise UserError(f"{key}: {config.path} is of kind {kind}, which has no columns; leave out image and captions")
    if kind == "folder" and config.label not in (None, FOLDER):
        raise UserError(
            f"{key}.label: {config.path} is of kind folder, which has no columns; set it to {FOLDER}: the first folder "
            f"of a picture's path is its class then"
        )
    if kind in ("folder", "webdataset", "csv") and config.split:
        raise UserError(f"{key}.split: {config.path} is of kind {kind}, which has no splits; leave it out")
    for name in ("follow_links", "frame_rate"):
        if kind != "folder" and getattr(config, name):
            raise UserError(
                f"{key}.{name}: {config.path} is of kind {kind}; it is for folders of pictures; leave it out"
            )
