"""Rows of a table, whatever its format, and the source that they make."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS, SourceConfig, SourceKind
from bigdit.errors import UserError
from bigdit.sources.columns import Cells, Columns, captions_of, choose
from bigdit.sources.disk import PICTURE_BYTES, check_size, read_file, sampled_digest, unreadable
from bigdit.sources.labels import label_of
from bigdit.sources.protocol import Contents, Entry, Readable, Unusable
from bigdit.sources.videos.animation import contents_of
from bigdit.sources.videos.resample import Clip
from bigdit.sources.videos.video import is_video, video_frames

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
