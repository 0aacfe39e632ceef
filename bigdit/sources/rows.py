"""Rows of a table of any format: the columns that hold pictures, captions or labels, and the source that they make."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS, SourceConfig, SourceKind
from bigdit.errors import UserError, nearest
from bigdit.sources.captions import label_of, weighted
from bigdit.sources.disk import PICTURE_BYTES, check_size, read_file, sampled_digest, unreadable
from bigdit.sources.protocol import Caption, Contents, Entry, Readable, Unusable
from bigdit.sources.videos import Clip, contents_of, is_video, video_frames
from bigdit.units import how_many

# A row by columns; or the reason why it cannot be read.
Row = Mapping[str, Any] | Unusable


@runtime_checkable
class Picture(Protocol):
    """Where the bytes of a picture are."""

    def read(self) -> bytes: ...


class Rows(Protocol):
    """Rows in a fixed order; `digest` is equal where they are. `where` names them in errors."""

    where: str
    digest: str
    columns: Mapping[str, Cells]

    def __len__(self) -> int: ...

    def read(self, start: int, end: int, columns: Sequence[str]) -> Sequence[Row]:
        """Some columns of the rows [start, end); a cell that holds a picture is given as a Picture."""
        ...

    def entries(self) -> Iterator[Entry]:
        """The files."""
        ...

    def name(self, row: int) -> str:
        """A row as people find it."""
        ...

    def base(self, row: int) -> Path:
        """The folder where relative paths of the row start."""
        ...


@dataclass(frozen=True)
class FilePicture:
    """A picture that a table names; the table does not show whether it is there."""

    path: Path

    def read(self) -> bytes:
        """Raises Unusable where it alone is missing; UserError where its whole folder is, since it may come back."""
        with self._missing_told():
            return read_file(self.path, PICTURE_BYTES)

    def frames(self, clip: Clip, max_pixels: int) -> Iterator[Image.Image]:
        """Of a video. Raises as `read` and `video_frames`."""
        with self._missing_told():
            yield from video_frames(self.path, clip, max_pixels)

    @contextlib.contextmanager
    def _missing_told(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if _holds_files(self.path.parent):
                raise Unusable(f"picture {self.path.name} is missing") from None
            raise unreadable(self.path, error) from None
        except ValueError:
            raise Unusable("path with a zero byte") from None


def _holds_files(folder: Path) -> bool:
    """Whether a folder is there, and is not the empty place of a disk that is gone."""
    try:
        with os.scandir(folder) as entries:
            return any(entries)
    except OSError:
        return False


@dataclass(frozen=True)
class TableItem(Readable):
    """One row: its picture, and the cells that its captions or its label are made of; `clip`: of videos."""

    index: int
    name: str
    row: Row
    columns: Columns
    picture: Picture | None
    clip: Clip | None = None

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        if isinstance(self.row, Unusable):
            raise self.row
        if self.picture is None:
            raise Unusable(f"column {self.columns.image} names no picture")
        column = self.columns.label
        label = None if column is None else label_of(self.row[column], f"column {column}")
        captions = captions_of(self.row, self.columns) if column is None else ()
        if self.clip is not None and isinstance(self.picture, FilePicture) and is_video(self.picture.path):
            frames = partial(self.picture.frames, self.clip, max_pixels)
            return Contents(frames, partial(sampled_digest, self.picture.path), captions, label)
        data = self.picture.read()
        check_size("picture", len(data), PICTURE_BYTES)
        return contents_of(data, self.clip, max_pixels, captions, label)


class TableSource:
    """The rows of a table, each a picture with captions or a label."""

    class_names: Collection[str] = ()

    def __init__(self, kind: SourceKind, rows: Rows, config: SourceConfig, key: str, clip: Clip | None = None) -> None:
        """`clip`: what of videos is taken. Raises UserError, which names `key`, where columns are missing or there are
        no rows."""
        self._columns = choose(config, rows.columns, rows.where, key)
        if not len(rows):
            raise UserError(f"{key}: {rows.where} has no rows")
        self._rows, self._clip = rows, clip
        # Other columns make other features of the same rows.
        digest = xxhash.xxh3_128_hexdigest(f"{rows.digest} {self._columns}".encode())
        self.identity = {"kind": kind, "count": len(rows), "digest": digest}

    def __len__(self) -> int:
        return len(self._rows)

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return self._rows.entries()

    def items(self, start: int, end: int) -> list[TableItem]:
        """Rows [start, end)."""
        rows = self._rows.read(start, min(end, len(self)), self._columns.names)
        return [self._item(index, row) for index, row in enumerate(rows, start)]

    def _item(self, index: int, row: Row) -> TableItem:
        name, picture = self._rows.name(index), None
        if not isinstance(row, Unusable):
            cell = row[self._columns.image]
            if isinstance(cell, Picture):
                picture = cell
            elif cell:
                name, picture = cell, FilePicture(self._rows.base(index) / cell)
        return TableItem(index, name, row, self._columns, picture, self._clip)


# What a column's cells are: encoded pictures, a text (of CSV: anything), several texts, numbers, something else.
Cells = Literal["picture", "text", "texts", "numbers", "other"]

IMAGE_COLUMNS = ("image", "path", "image_path", "file", "file_name", "filename", "filepath")
CAPTION_COLUMNS = ("caption", "captions", "text")


@dataclass(frozen=True)
class Columns:
    """The column of pictures or of their paths, and each caption column with its weight, a number or the column
    that holds it; or the column of labels."""

    image: str
    captions: tuple[tuple[str, float | str], ...]
    label: str | None = None

    @property
    def names(self) -> list[str]:
        """All of them, each once."""
        weights = [weight for _, weight in self.captions if isinstance(weight, str)]
        labels = [] if self.label is None else [self.label]
        return list(dict.fromkeys([self.image, *(column for column, _ in self.captions), *weights, *labels]))

    def __repr__(self) -> str:
        """What a store's digest is of: of captions alone as it was before there were labels."""
        label = "" if self.label is None else f", label={self.label!r}"
        return f"Columns(image={self.image!r}, captions={self.captions!r}{label})"


def choose(config: SourceConfig, found: Mapping[str, Cells], where: str, key: str) -> Columns:
    """The columns that `config` asks for, or those of the usual names, in the table `where`.

    Raises UserError with every column that is missing, of another type, or must be named.
    """
    problems: list[str] = []
    image = config.image or _usual(found, IMAGE_COLUMNS, ("picture", "text"), problems, where, f"{key}.image")
    captions = config.captions
    if not captions and config.label is None:
        usual = _usual(found, CAPTION_COLUMNS, ("text", "texts"), problems, where, f"{key}.captions")
        captions = {usual: 1.0} if usual else {}
    wanted: list[tuple[str, str, tuple[Cells, ...]]] = [("image", image, ("picture", "text"))] if image else []
    for column, weight in captions.items():
        wanted.append(("captions", column, ("text", "texts")))
        if isinstance(weight, str):
            wanted.append(("captions", weight, ("numbers", "text")))  # in CSV, numbers are text
    if config.label is not None:
        wanted.append(("label", config.label, ("text", "numbers")))
    for setting, column, kinds in wanted:
        if column not in found:
            problems.append(f"{key}.{setting}: {where} has no column {column}; {nearest(column, found)}")
        elif found[column] not in kinds:
            problems.append(f"{key}.{setting}: column {column} of {where} holds {found[column]}, not {kinds[0]}")
    if problems or image is None:
        raise UserError(*problems)
    return Columns(image, tuple(captions.items()), config.label)


def captions_of(row: Mapping[str, Any], columns: Columns) -> tuple[Caption, ...]:
    """The captions of a row; each text of a list has the weight of its column, or its own of a list of weights.

    Raises Unusable as `weighted`.
    """
    texts: list[Any] = []
    weights: list[Any] = []
    for column, weight in columns.captions:
        cell = row[column]
        if cell is None:
            continue
        listed = cell if isinstance(cell, list) else [cell]
        share = _numbers(row[weight], weight) if isinstance(weight, str) else weight
        shares = share if isinstance(share, list) else [share] * len(listed)
        if len(shares) != len(listed):
            found = f"{how_many(len(listed), 'text')} and {how_many(len(shares), 'weight')}"
            raise Unusable(f"caption column {column} has {found}")
        texts += listed
        weights += shares
    return weighted(texts, weights, "column " + ", ".join(column for column, _ in columns.captions))


def _usual(
    found: Mapping[str, Cells],
    names: Sequence[str],
    kinds: Sequence[Cells],
    problems: list[str],
    where: str,
    key: str,
) -> str | None:
    """The one column of a usual name, or else the one of embedded pictures where such are looked for."""
    usual = [name for name in names if found.get(name) in kinds]
    usual = usual or [name for name, cells in found.items() if cells == "picture" and "picture" in kinds]
    if len(usual) == 1:
        return usual[0]
    several = f"has {', '.join(usual)}: say which is meant" if usual else f"has none of {', '.join(names)}"
    problems.append(f"{key}: {where} {several}; its columns: {', '.join(list(found)[:20]) or 'none'}")
    return None


def _numbers(cell: Any, column: str) -> Any:
    """The cell, a number where CSV gives it as text."""
    if not isinstance(cell, str):
        return cell
    try:
        return float(cell)
    except ValueError:
        raise Unusable(f"weight column {column} holds {cell!r}, not a number") from None
