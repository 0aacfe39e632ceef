"""Opens the sources of `data.images`: finds the kind and files of each path, and joins all sources into one list."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import xxhash

from bigdit import log
from bigdit.config.data import MAX_PIXELS, DataConfig, SourceConfig, SourceKind, frames_of
from bigdit.documents import read_json
from bigdit.errors import UserError, nearest
from bigdit.sources.captions import FOLDER, Ruled, Rules
from bigdit.sources.disk import not_there
from bigdit.sources.file_rows import FileRows
from bigdit.sources.folder import ImageFolder
from bigdit.sources.frame_folders import FrameFolders
from bigdit.sources.image import SUFFIXES, Varied
from bigdit.sources.protocol import Caption, Contents, Entry, Item, Source, cut
from bigdit.sources.tables import Rows, TableSource
from bigdit.sources.text_rows import METADATA, has_metadata, open_rows
from bigdit.sources.videos import Clip, Clips
from bigdit.sources.webdataset import WebDataset

INDEX = "index"  # the folder in data.features for listings and indices of sources


class Limits(NamedTuple):
    """Which sizes of images are used, and the buckets to train at: see DataConfig and SourceConfig."""

    max_pixels: int = MAX_PIXELS
    min_side: int = 1
    max_upscale: float | None = None
    buckets: tuple[tuple[int, ...], ...] = ()

    @property
    def changed(self) -> dict[str, Any]:
        """The values that are not the defaults, as in JSON."""
        found = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return found | ({"buckets": [list(bucket) for bucket in self.buckets]} if self.buckets else {})


@dataclass(frozen=True)
class ListedItem(Item):
    """An item of one source of the list, under its index in the whole list."""

    index: int
    name: str
    item: Item
    limits: Limits

    def read(self, max_pixels: int | None = None) -> Contents:
        """As Item.read. The default of `max_pixels` is the run's."""
        contents = self.item.read(max_pixels or self.limits.max_pixels)
        _, min_side, max_upscale, buckets = self.limits
        fit = replace(contents.fit, min_side=min_side, max_upscale=max_upscale, buckets=buckets)
        return replace(contents, fit=fit)

    def captions(self) -> tuple[Caption, ...]:
        """As Item.captions."""
        return self.item.captions()


class SourceList:
    """Sources one after another. To append a source changes no earlier index.

    `class_names`: the names of classes 0, 1, …, if they have names.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        titles: Sequence[str],
        class_names: Sequence[str] | None,
        limits: Sequence[Limits],
    ) -> None:
        self.sources = sources
        self._titles, self._limits = titles, limits
        known = {name for source in sources for name in source.class_names}
        self.class_names = sorted(known) if class_names is None else list(class_names)
        self._ends = list(itertools.accumulate(len(source) for source in sources))
        # With other limits, other images are skipped. With other buckets, latents differ.
        identities = [source.identity | each.changed for source, each in zip(sources, limits, strict=True)]
        digest = xxhash.xxh3_128_hexdigest("\n".join(identity["digest"] for identity in identities).encode())
        self.identity: dict[str, Any] = {"kind": "list", "count": len(self), "digest": digest, "sources": identities}

    def __len__(self) -> int:
        return self._ends[-1]

    def entries(self) -> Iterator[Entry]:
        """The entries of all sources."""
        return itertools.chain.from_iterable(source.entries() for source in self.sources)

    def items(self, start: int, end: int) -> list[ListedItem]:
        """Items [start, end) of the whole list. Their names begin with the source if there are several."""
        found: list[ListedItem] = []
        for number, first, begin, stop in cut(self._ends, start, end):
            prefix = f"{self._titles[number]}: " if len(self.sources) > 1 else ""
            inner, limits = self.sources[number].items(begin, stop), self._limits[number]
            found += [ListedItem(first + item.index, prefix + item.name, item, limits) for item in inner]
        return found


def open_source(data: DataConfig) -> SourceList:
    """List the sources of `data.images`, without reading images.

    Raises UserError with the problems of all sources: missing, empty, damaged or hostile files.
    """
    sources: list[Source] = []
    problems: list[str] = []
    for number, config in enumerate(data.images):
        try:
            sources.append(_open(config, data, _key(data, number)))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    limits = [Limits(data.max_pixels, data.min_side, data.max_upscale, each.buckets or ()) for each in data.images]
    return SourceList(sources, [str(config.path) for config in data.images], data.classes, limits)


def check_sources(data: DataConfig, *, listed: bool) -> list[str]:
    """Check the settings of `data.images`, and return the sources that do not exist here.

    Raises UserError for settings that the kind of a source does not have. If all exist and should be `listed`, raises
    as open_source does. Tars are not listed, since that writes an index.
    """
    kinds, missing, problems = set[SourceKind](), list[str](), list[str]()
    for number, config in enumerate(data.images):
        key, exists = _key(data, number), config.path.exists() or is_pattern(config.path)
        missing += [] if exists else [f"{key}: {config.path} {not_there(config.path)}"]
        if _is_url(config.path) or exists or config.kind is not None:  # else its kind is unknown
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


def _open(config: SourceConfig, data: DataConfig, key: str) -> Source:
    """A source with its clips, caption rules, crops and mirror images."""
    frames = _frames(config, data)
    clip = None if data.fps is None or frames is None else Clip(data.fps, frames)
    source = _open_files(config, data, key, clip)
    if clip is not None and config.clips > 1:
        source = Clips(source, config.clips, clip)
    if (rules := Rules.of(config)) is not None:
        if joined := rules.joined:
            log.notice(f"{key}.{joined}")
        source = Ruled(source, rules)
    return Varied(source, config.crops, config.flip) if config.crops > 1 or config.flip else source


def _frames(config: SourceConfig, data: DataConfig) -> int | None:
    """The most frames of the source's buckets; None if all are for images."""
    videos = [bucket for bucket in config.buckets or data.buckets if len(bucket) == 3]
    return max(map(frames_of, videos), default=None)


def _is_url(path: Path) -> bool:
    return re.match(r"\w{2,}:/", str(path)) is not None


def _checked_kind(config: SourceConfig, data: DataConfig, key: str) -> SourceKind:
    if _is_url(config.path):
        raise UserError(
            f"{key}: {config.path} is a URL, and images are read from this machine; download them, and name their "
            "folder"
        )
    kind = kind_of(config, key)
    _refuse_columns(config, kind, key)
    if kind == "webdataset" and data.references:
        raise UserError(
            f"{key}: data.references is {data.references}, and {config.path} is of kind {kind}, which has none here; "
            "use a folder or a table"
        )
    videos, sizes = _frames(config, data) is not None, f"{key}.buckets" if config.buckets else "data.buckets"
    for name, is_set in ("frame_rate", config.frame_rate is not None), ("clips", config.clips > 1):
        if is_set and not videos:
            raise UserError(f"{key}.{name} is for videos, and {sizes} has no frames; leave it out")
    if config.mask is not None and videos:
        raise UserError(f"{key}.mask is for images, and {sizes} has frames; leave it out")
    return kind


def _open_files(config: SourceConfig, data: DataConfig, key: str, clip: Clip | None) -> Source:
    kind = _checked_kind(config, data, key)
    rows: Callable[[], Rows]
    match kind:
        case "folder":
            if config.frame_rate is None:
                return ImageFolder(config, key, clip, data.reference_counts)
            assert clip is not None  # without frames, frame_rate is rejected
            return FrameFolders(config, key, config.frame_rate, clip)
        case "webdataset":
            if data.features is None:
                raise UserError(
                    f"{key}: {config.path} holds tars. Their index needs data.features, and strategy.features is "
                    "online; set it to cached, and run `bigdit extract`"
                )
            tars = files_of(config, ".tar", key)
            return WebDataset(tars, data.features / INDEX, data.workers, key, config, clip)
        case "csv" | "json":
            rows = partial(open_rows, config.path, key, kind)
        case "datasets" if any((config.path / name).exists() for name in (STATE, SPLITS)):
            rows = partial(FileRows, saved_files(config, key), "arrow", str(config.path), key)
        case "datasets" | "parquet":
            rows = partial(FileRows, files_of(config, ".parquet", key), "parquet", str(config.path), key)
        case _:
            assert_never(kind)
    return TableSource(kind, rows, config, key, clip, data.reference_counts)


def _refuse_columns(config: SourceConfig, kind: SourceKind, key: str) -> None:
    """Raise UserError for columns and splits that the kind of the path does not have."""
    if kind == "webdataset" and (config.image or config.captions):
        raise UserError(f"{key}: {config.path} is of kind {kind}, which has no columns; leave out image and captions")
    if (
        kind == "folder"
        and (config.captions or config.image)
        and config.path.is_dir()
        and not has_metadata(config.path)
    ):
        raise UserError(
            f"{key}: {config.path} is a folder without metadata.jsonl, .csv or .parquet, so it has no columns; "
            "leave out image and captions"
        )
    if kind == "folder" and config.label not in (None, FOLDER):
        raise UserError(
            f"{key}.label: {config.path} is of kind folder, which has no columns; set it to {FOLDER}, and the first "
            f"folder of an image's path is its class"
        )
    if kind in ("folder", "webdataset", "csv", "json") and config.split:
        raise UserError(f"{key}.split: {config.path} is of kind {kind}, which has no splits; leave it out")
    for name in ("follow_links", "frame_rate", "mask"):
        if kind != "folder" and getattr(config, name):
            raise UserError(f"{key}.{name}: {config.path} is of kind {kind}; it is for folders of images; leave it out")


MOST_FILES = 1_000_000  # of a pattern

KINDS: dict[str, SourceKind] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".tar": "webdataset",
    ".gz": "webdataset",  # which rejects it, and says why
    ".tgz": "webdataset",
}
_OTHERS = {
    ".zip": "a ZIP archive; unpack it and name its folder, or pack it as a .tar",
    ".7z": "a 7z archive; unpack it and name its folder",
    ".rar": "a RAR archive; unpack it and name its folder",
    ".xlsx": "an Excel table; save it as CSV",
    ".arrow": "a part of what `datasets` saved; name its folder",
    ".txt": "a text; name the folder of its image, or write a list with image and caption as .csv or .jsonl",
}
STATE, SPLITS = "state.json", "dataset_dict.json"  # in a folder that `datasets` saved
# `push_to_hub` writes train-00000-of-00002.parquet. Older names have a hash after the count.
_HUB_NAME = re.compile(r"(?P<split>.+?)-\d{5}-of-\d{5}(-\w+)?\.parquet")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def kind_of(config: SourceConfig, key: str) -> SourceKind:
    """The kind that is set, or the kind of the files of the path. Raises UserError if there are several."""
    if config.kind is not None:
        return config.kind
    suffix = config.path.suffix.lower()
    if suffix in KINDS and not config.path.is_dir():
        return KINDS[suffix]
    if config.path.is_file():
        if suffix in _OTHERS:
            raise UserError(f"{key}: {config.path} is {_OTHERS[suffix]}")
        what = f"a {suffix} file" if suffix else "a file without a suffix"
        raise UserError(
            f"{key}: {config.path} is {what}; give a folder of images or videos, a .csv, .tsv, .json, .jsonl or "
            ".parquet table, .tar files (WebDataset), or a folder that `datasets` saved"
        )
    found = _kinds_within(config.path)
    if len(found) > 1:
        raise UserError(f"{key}.kind: {config.path} holds files of {' and '.join(sorted(found))}; say which is meant")
    return found.pop() if found else "folder"


def is_pattern(path: Path) -> bool:
    """Whether a path is a pattern of file names."""
    return glob.has_magic(str(path)) or _BRACES.search(str(path)) is not None


def files_of(config: SourceConfig, suffix: str, key: str) -> list[Path]:
    """The files of `config.path`: the file, a pattern's files, or a folder's files with `suffix`; of the chosen split.

    Raises UserError if there are none, or if a split must be chosen.
    """
    path = config.path
    if path.is_dir():
        below = path.glob(f"**/*{suffix}") if suffix == ".parquet" else path.glob(f"*{suffix}")
        files = sorted(file for file in below if not file.name.startswith("."))
        if not files:
            raise UserError(f"{key}: the folder {path} holds no {suffix} files")
        return _of_split(files, config.split, key) if suffix == ".parquet" else files
    files = []
    for expanded in _expanded(str(path), key):
        matches = sorted(map(Path, glob.glob(expanded, recursive=True))) if glob.has_magic(expanded) else []
        if not matches and not os.path.exists(expanded):
            why = not_there(path) if expanded == str(path) else f"does not exist, of {path}"
            raise UserError(f"{key}: {expanded} {why}")
        files += matches or [Path(expanded)]
    return files


def saved_files(config: SourceConfig, key: str) -> list[Path]:
    """The Arrow files of a folder that `datasets` saved, of the chosen split.

    Raises UserError if a split must be chosen, or files are missing.
    """
    folder = config.path
    if (folder / SPLITS).is_file():
        listed = _json(folder / SPLITS, key).get("splits")
        splits = [str(split) for split in listed] if isinstance(listed, list) else []
        folder = folder / _choose(splits, config.split, key)
    elif config.split is not None:
        raise UserError(f"{key}.split: {folder} holds one split; leave split out")
    listed = _json(folder / STATE, key).get("_data_files")
    files = listed if isinstance(listed, list) else []
    names: list[Any] = [file.get("filename") if isinstance(file, dict) else file for file in files]
    wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if wrong or not names:
        raise UserError(f"{key}: {folder / STATE} names no data files of its folder: {names[:3]}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{key}: {folder} lacks {len(missing)} of {len(names)} files, the first {missing[0]}")
    return [folder / name for name in names]


def _kinds_within(folder: Path) -> set[SourceKind]:
    """The kinds of files at the top of a folder; none for a folder of folders."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return set()  # opening it as a folder raises
    if names & {STATE, SPLITS}:
        return {"datasets"}
    suffixes = {os.path.splitext(name)[1].lower() for name in names.difference(METADATA)}
    found: set[SourceKind] = {KINDS[suffix] for suffix in suffixes & {".tar", ".parquet"}}
    if suffixes & set(SUFFIXES):
        found.add("folder")
    return found or ({"parquet"} if any((folder / "data").glob("*.parquet")) else set())


def _expanded(pattern: str, key: str) -> Iterator[str]:
    """The pattern with each alternative of its braces: `{000..099}`, `{a,b}`."""
    pieces = _BRACES.split(pattern)  # alternately text and the contents of braces
    choices: list[Sequence[str]] = []
    count = 1
    for number, piece in enumerate(pieces):
        numbers = _RANGE.fullmatch(piece) if number % 2 else None
        if numbers:
            first, last = int(numbers[1]), int(numbers[2])
            count *= max(last - first + 1, 0)
        elif number % 2:
            count *= piece.count(",") + 1
        if not 0 < count <= MOST_FILES:
            raise UserError(f"{key}: {pattern} names {count} files; the limits are 1 and {MOST_FILES}")
        if numbers:
            choices.append([str(at).zfill(len(numbers[1])) for at in range(first, last + 1)])
        else:
            choices.append(piece.split(",") if number % 2 else [piece])
    return map("".join, itertools.product(*choices))


def _of_split(files: list[Path], split: str | None, key: str) -> list[Path]:
    """The files of one split, by their names on the hub; all files if the names have no split."""
    named = {file: match["split"] for file in files if (match := _HUB_NAME.fullmatch(file.name))}
    splits = sorted(set(named.values()))
    if not splits and split is None:
        return files
    chosen = _choose(splits, split, key)
    return [file for file in files if named.get(file) == chosen]


def _choose(splits: Sequence[str], split: str | None, key: str) -> str:
    if split is None:
        if len(splits) != 1:
            raise UserError(f"{key}.split: missing; there are {', '.join(splits) or 'none'}")
        return splits[0]
    if split not in splits:
        raise UserError(f"{key}.split: there is no {split}; {nearest(split, splits)}")
    return split


def _json(path: Path, key: str) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        raise UserError(f"{key}: {path} is missing or damaged; save the data set again") from None
    if not isinstance(value, dict):
        raise UserError(f"{key}: {path} is not a JSON object; save the data set again")
    return value
