"""Tables of any format as sources: their rows, and their columns of images, captions or labels."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import itertools
import os
import re
import tokenize
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS, SourceConfig, SourceKind
from bigdit.documents import parse_json
from bigdit.errors import UserError, nearest
from bigdit.sources.captions import label_of, reads_captions, weighted
from bigdit.sources.disk import (
    IMAGE_BYTES,
    OF_WINDOWS,
    WINDOWS,
    check_size,
    empty_folder_above,
    not_mounted,
    read_file,
    sampled_digest,
)
from bigdit.sources.image import SUFFIXES, with_references
from bigdit.sources.protocol import Caption, Contents, Entry, Item, Unusable
from bigdit.sources.videos import Clip, contents_of, is_video, video_frames
from bigdit.units import how_many

T = TypeVar("T")

# A row by columns, or why it cannot be read.
Row = Mapping[str, Any] | Unusable


@runtime_checkable
class ImageBytes(Protocol):
    """Reads the bytes of an image."""

    def read(self) -> bytes: ...


class Rows(Protocol):
    """Rows in a fixed order. `digest`: equal for equal rows. `where`: the table in errors."""

    where: str
    digest: str
    columns: Mapping[str, Cells]

    def __len__(self) -> int: ...

    def read(self, start: int, end: int, columns: Sequence[str]) -> Sequence[Row]:
        """Some columns of the rows [start, end). Cells of images are ImageBytes."""
        ...

    def entries(self) -> Iterator[Entry]:
        """The files."""
        ...

    def name(self, row: int) -> str:
        """The name of a row for people."""
        ...

    def base(self, row: int) -> Path:
        """The folder that the row's paths are relative to."""
        ...


@dataclass(frozen=True)
class Table:
    """A table to read again in another process. Equal for equal rows. `columns`: those that name images."""

    digest: str
    columns: tuple[str, ...]
    open: Callable[[], Rows] = field(compare=False)

    def names_others(self, image: Path, folder: Path) -> bool:
        """Whether the table names another image than `image` in `folder` or below it. Reads the table once."""
        within = (parent for parent in _named(self) if parent == folder or folder in parent.parents)
        return any(parent / name != image for parent in within for name in _named(self)[parent])


@cache
def _named(table: Table) -> Mapping[Path, Collection[str]]:
    """The folders of the images that a table names, each with one or two of their names."""
    rows = table.open()
    found: dict[Path, set[str]] = {}
    for start in range(0, len(rows), _ROWS):
        for index, row in enumerate(rows.read(start, min(start + _ROWS, len(rows)), table.columns), start):
            cells = () if isinstance(row, Unusable) else (row[column] for column in table.columns)
            for image in (each for cell in cells for each in _images(cell, rows.base(index))):
                if isinstance(image, ImageFile) and len(names := found.setdefault(image.path.parent, set())) < 2:
                    names.add(image.path.name)
    return found


_ROWS = 1024  # read at a time


@dataclass(frozen=True)
class ImageFile:
    """An image file that a table names. It may be missing. `relative`: its path is relative to the table's folder."""

    path: Path
    relative: bool = False
    table: Table | None = None

    def read(self) -> bytes:
        """The bytes of the file. Raises Unusable if it is missing, and UserError if its disk may be."""
        with self._error_if_missing():
            return read_file(self._on_disk(), IMAGE_BYTES)

    def frames(self, clip: Clip, max_pixels: int) -> Iterator[Image.Image]:
        """Frames of a video. Raises as `read` and `video_frames`."""
        with self._error_if_missing():
            yield from video_frames(self._on_disk(), clip, max_pixels)

    def _on_disk(self) -> Path:
        """The path, or the first other form that exists.

        The forms have no space at the end, and slashes for Windows' backslashes, in NFC or NFD. Last come the suffixes
        of images, which kohya's lists leave out.
        """
        text = str(self.path)
        plain = text.rstrip().replace("\\", "/")
        others = [plain, *([] if text.isascii() else [unicodedata.normalize(form, plain) for form in ("NFC", "NFD")])]
        found = next((Path(each) for each in (text, *others) if os.path.lexists(each)), None)
        suffixes = () if found or self.path.suffix else SUFFIXES
        return found or next((each for suffix in suffixes if os.path.exists(each := Path(text + suffix))), self.path)

    @contextlib.contextmanager
    def _error_if_missing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if _URL.search(str(self.path)):
                raise Unusable("image is a URL, which is not read; download it, and name the file") from None
            if WINDOWS.search(str(self.path)):
                raise Unusable(f"image is {OF_WINDOWS}") from None
            empty = empty_folder_above(self.path)
            if empty and self.table and self.table.names_others(self.path, empty):
                raise not_mounted(self.path, empty) from None
            hint = "; its path is relative to the table" if self.relative else ""
            raise Unusable(f"image {self.path.name} is missing{hint}") from None
        except ValueError:
            raise Unusable("path with a zero byte") from None


@dataclass(frozen=True)
class ImageText:
    """An image that a table holds in base64, as itself or as a data URL."""

    text: str

    def read(self) -> bytes:
        """The bytes of the image. Raises Unusable if they are no base64."""
        try:
            return base64.b64decode(self.text.rpartition(",")[2].encode(), validate=True)
        except ValueError:
            raise Unusable("image in base64 is damaged; write it again, or name a file") from None


_BASE64 = re.compile(r"data:image/|(iVBORw0KGgo|/9j/|UklGR|R0lGOD)[A-Za-z0-9+/]{60}")  # of PNG, JPEG, WebP and GIF
_URL = re.compile(r"(^|/)[a-z][a-z0-9+.-]+:/")  # in a path, which has one slash


@dataclass(frozen=True)
class TableItem(Item):
    """One row: its image, the cells of its captions or label, and for an edit the images before it.

    `clip`: the part of a video to read. `where`: the row, if `name` is the image's. `edited`: how many references an
    edit may have.
    """

    index: int
    name: str
    row: Row
    columns: Columns
    image: ImageBytes | None
    clip: Clip | None = None
    references: tuple[ImageBytes, ...] = ()
    where: str | None = None
    edited: range = range(1, 2)

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        contents = self._naming_row(partial(self._read, max_pixels))
        return replace(contents, references=tuple(partial(self._naming_row, each) for each in contents.references))

    def _naming_row(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except Unusable as error:
            raise Unusable(str(error) if self.where is None else f"{error} ({self.where})") from None

    def captions(self) -> tuple[Caption, ...]:
        """As Item.captions."""
        if isinstance(self.row, Unusable):
            raise self.row
        return captions_of(self.row, self.columns) if self.columns.captions else ()

    def _read(self, max_pixels: int) -> Contents:
        if isinstance(self.row, Unusable):
            raise self.row
        if self.image is None:
            raise Unusable(f"column {self.columns.image} names no image")
        column = self.columns.label
        label = None if column is None else label_of(self.row[column], f"column {column}")
        captions = self.captions()
        if self.clip is not None and isinstance(self.image, ImageFile) and is_video(self.image.path):
            frames = partial(self.image.frames, self.clip, max_pixels)
            return Contents(frames, partial(sampled_digest, self.image.path), captions, label)
        contents = contents_of(_bytes(self.image), self.clip, max_pixels, captions, label)
        if self.columns.reference is None:
            return contents
        if not self.references and 0 not in self.edited:
            raise Unusable(f"column {self.columns.reference} names no image")
        if len(self.references) not in self.edited:
            names = how_many(len(self.references), "image")
            least, most = self.edited[0], self.edited[-1]
            few = len(self.references) < least
            key = "min_references" if few and least != most else "references"
            raise Unusable(f"column {self.columns.reference} names {names}, and data.{key} is {least if few else most}")
        try:
            return with_references(contents, [_bytes(each) for each in self.references], max_pixels)
        except Unusable as error:
            raise Unusable(f"reference: {error}") from None


def _bytes(image: ImageBytes) -> bytes:
    data = image.read()
    check_size("image", len(data), IMAGE_BYTES)
    return data


class TableSource:
    """The rows of a table, each an image with captions or a label."""

    class_names: Collection[str] = ()

    def __init__(
        self,
        kind: SourceKind,
        opened: Callable[[], Rows],
        config: SourceConfig,
        key: str,
        clip: Clip | None = None,
        references: range = range(0),
    ) -> None:
        """`opened`: opens the rows, here and in workers. `clip`: the part of videos to read. `references`: how many
        images come before an edit.

        Raises UserError, which names `key`, for missing columns or no rows, and as `opened`.
        """
        rows = opened()
        self._columns = choose(config, rows.columns, rows.where, key, bool(references))
        if not len(rows):
            raise UserError(f"{key}: {rows.where} has no rows")
        self._rows, self._clip, self._edited = rows, clip, references
        # The columns are digested too, since other columns give other features.
        edits = f" {self._columns.reference}" if references else ""
        digest = xxhash.xxh3_128_hexdigest(f"{rows.digest} {self._columns}{edits}".encode())
        self.identity = {"kind": kind, "count": len(rows), "digest": digest}
        images = (self._columns.image, self._columns.reference)
        self._table = Table(digest, tuple(each for each in images if each is not None), opened)

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
        name, columns, base = self._rows.name(index), self._columns, self._rows.base(index)
        if isinstance(row, Unusable):
            return TableItem(index, name, row, columns, None, self._clip)
        image = _image(row[columns.image], base, self._table)
        edited = () if columns.reference is None else _images(row[columns.reference], base, self._table)
        where, name = (name, str(row[columns.image])) if isinstance(image, ImageFile) else (None, name)
        return TableItem(index, name, row, columns, image, self._clip, edited, where, self._edited)


def _image(cell: Any, base: Path, table: Table | None = None) -> ImageBytes | None:
    """The image of a cell: its bytes, also in base64, or its path relative to `base`."""
    if isinstance(cell, ImageBytes):
        return cell
    if not isinstance(cell, str) or not cell:
        return None
    if _BASE64.match(cell):
        return ImageText(cell)
    return ImageFile(base / cell, not Path(cell).is_absolute(), table)


def _images(cell: Any, base: Path, table: Table | None = None) -> tuple[ImageBytes, ...]:
    """The images of a cell: one, or a list of paths."""
    found = (_image(each, base, table) for each in _values(cell))
    return tuple(each for each in found if each is not None)


def _values(cell: Any) -> list[Any]:
    """The values of a cell: one, or a list. In CSV the list is JSON, or as Python or NumPy prints it."""
    if isinstance(cell, str) and cell.startswith("["):
        with contextlib.suppress(ValueError):
            return parse_json(cell.encode())
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
            return found if isinstance(found := ast.literal_eval(_with_commas(cell)), list) else [cell]
    return cell if isinstance(cell, list) else [cell]


def _with_commas(cell: str) -> str:
    """A printed list, with commas between texts that NumPy leaves out: Python would join these texts."""
    parts = [each for each in tokenize.generate_tokens(io.StringIO(cell).readline) if each.string.strip()]
    kinds = [each.type for each in parts]
    commas = [kind == next_kind == tokenize.STRING for kind, next_kind in itertools.pairwise(kinds)]
    return "".join(each.string + ("," if comma else " ") for each, comma in zip(parts, [*commas, False], strict=True))


# The kind of a column's cells. Cells of CSV are always text.
Cells = Literal["image", "text", "texts", "numbers", "other"]

IMAGE_COLUMNS = ("image", "path", "image_path", "file", "file_name", "filename", "filepath")
CAPTION_COLUMNS = ("caption", "captions", "text")


@dataclass(frozen=True)
class Columns:
    """The columns of images or their paths, of captions with their weights or of labels, and of references.

    A weight is a number, or the name of the column that holds it.
    """

    image: str
    captions: tuple[tuple[str, float | str], ...]
    label: str | None = None
    reference: str | None = field(default=None, repr=False)  # identities of sources without it have none

    @property
    def names(self) -> list[str]:
        """All columns, each once."""
        weights = [weight for _, weight in self.captions if isinstance(weight, str)]
        others = [each for each in (self.label, self.reference) if each is not None]
        return list(dict.fromkeys([self.image, *(column for column, _ in self.captions), *weights, *others]))


def choose(config: SourceConfig, found: Mapping[str, Cells], where: str, key: str, edits: bool = False) -> Columns:
    """The columns that `config` names in the table `where`, or those with usual names.

    Raises UserError for all columns that are missing, have another type, or must be named.
    """
    problems: list[str] = []
    edited = config.reference if edits else None
    images = {name: cells for name, cells in found.items() if name != edited}
    image = config.image or _usual(images, IMAGE_COLUMNS, ("image", "text"), problems, where, f"{key}.image")
    captions = config.captions
    if not captions and reads_captions(config):
        usual = _usual(found, CAPTION_COLUMNS, ("text", "texts"), problems, where, f"{key}.captions")
        captions = {usual: 1.0} if usual else {}
    wanted: list[tuple[str, str, tuple[Cells, ...]]] = [("image", image, ("image", "text"))] if image else []
    for column, weight in captions.items():
        wanted.append(("captions", column, ("text", "texts")))
        if isinstance(weight, str):
            wanted.append(("captions", weight, ("numbers", "text")))  # in CSV, numbers are text
    if config.label is not None:
        wanted.append(("label", config.label, ("text", "numbers")))
    if edited is not None:
        wanted.append(("reference", edited, ("image", "text", "texts")))
    for setting, column, kinds in wanted:
        if column not in found:
            problems.append(f"{key}.{setting}: {where} has no column {column}; {nearest(column, found)}")
        elif found[column] not in kinds:
            problems.append(f"{key}.{setting}: column {column} of {where} holds {found[column]}, not {kinds[0]}")
    if problems or image is None:
        raise UserError(*problems)
    return Columns(image, tuple(captions.items()), config.label, edited)


def captions_of(row: Mapping[str, Any], columns: Columns) -> tuple[Caption, ...]:
    """The captions of a row. A list of texts has one weight, or a list of weights. Raises Unusable as `weighted`."""
    texts: list[Any] = []
    weights: list[Any] = []
    for column, weight in columns.captions:
        cell = row[column]
        if cell is None:
            continue
        listed = _values(cell)
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
    """The only column with a usual name, in any case; else the only column of embedded images, if `kinds` allows it.

    Without one, adds to `problems`.
    """
    named = {name.casefold(): name for name in sorted(found)}
    names = [named.get(name, name) for name in names]
    usual = [name for name in names if found.get(name) in kinds]
    usual = usual or [name for name, cells in found.items() if cells == "image" and "image" in kinds]
    if len(usual) == 1:
        return usual[0]
    others = [f"{found[name].replace('other', 'another type')} in {name}" for name in names if name in found]
    if usual:
        what = f"has {', '.join(usual)}: say which is meant"
    elif others:
        what = f"holds {', '.join(others)}, not {kinds[0]}"
    else:
        what = f"has none of {', '.join(names)}: say which is meant"
    problems.append(f"{key}: {where} {what}; its columns: {', '.join(list(found)[:20]) or 'none'}")
    return None


def _numbers(cell: Any, column: str) -> Any:
    """The cell; text from CSV becomes a number."""
    if not isinstance(cell, str):
        return cell
    try:
        return float(cell)
    except ValueError:
        raise Unusable(f"weight column {column} holds {cell!r}, not a number") from None
