"""Rows of text files: CSV (RFC 4180), TSV, JSON lists and JSONL.

A file is scanned once. The offset of one row in 1024 is kept, and rows are read at offsets. Files in UTF-16, and lists
that are one JSON value, are held in memory.
"""

from __future__ import annotations

import csv
import io
import json
import os
import unicodedata
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bigdit import log
from bigdit.config.data import SourceConfig, SourceKind
from bigdit.errors import UserError
from bigdit.files import leads_out, lfs_pointer, open_file
from bigdit.sources.captions import UTF_16
from bigdit.sources.disk import not_there, read_range
from bigdit.sources.file_rows import FileRows
from bigdit.sources.image import SUFFIXES
from bigdit.sources.protocol import Entry, Unusable
from bigdit.sources.tables import CAPTION_COLUMNS, IMAGE_COLUMNS, Cells, Row, Rows, captions_of, choose
from bigdit.units import how_many

BLOCK = 1024  # rows that are read at a time
BLOCK_BYTES = 2**28  # 256 KiB a row; more means that a quote is never closed
CHUNK_BYTES = 2**22
HELD_BYTES = 2**30
"""The most bytes of a file that is held in memory."""


class TextRows(ABC):
    """Records of a text file: the first `headers` are headers, the others are rows. `digest` covers the file's
    bytes."""

    headers: int
    columns: Mapping[str, Cells]

    def __init__(self, path: Path, key: str) -> None:
        """Scan the file. Raises UserError if it is missing or empty, or its records have no end."""
        self.where, self._path = str(path), path
        digest = xxhash.xxh3_128()
        # The start of each block of records, and the end of the file.
        self._offsets = array("Q", [0])
        records = size = state = 0
        last = b"\n"
        try:
            if pointer := lfs_pointer(path):
                raise UserError(f"{key}: {pointer}")
            self._held = self._whole(key)
            with open_file(path) if self._held is None else io.BytesIO(self._held) as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    ends, state = self._ends(chunk, state)
                    # A block begins after the last record of the one before.
                    self._offsets.extend((size + 1 + ends[BLOCK - 1 - records % BLOCK :: BLOCK]).tolist())
                    records, size, last = records + len(ends), size + len(chunk), chunk[-1:]
        except FileNotFoundError:
            raise UserError(f"{key}: the file {path} {not_there(path)}") from None
        except OSError as error:
            raise UserError(f"{key}: {path} cannot be read: {error.strerror}") from None
        if state:
            raise UserError(f'{key}: a quote in {path} is never closed; a " within quotes is written ""')
        self._records = records + (last != b"\n")
        if self._offsets[-1] != size:
            self._offsets.append(size)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return self._records - self.headers

    def read(self, start: int, end: int, columns: Sequence[str]) -> list[Row]:
        """Rows [start, end)."""
        first, last = start + self.headers, min(end + self.headers, self._records)
        found: list[Row] = []
        for block in range(first // BLOCK, -(-last // BLOCK)):
            begin = block * BLOCK
            found += self._rows(self._block(block)[max(first - begin, 0) : last - begin], columns)
        return found

    def entries(self) -> Iterator[Entry]:
        """One entry: the file, with its digest."""
        yield Entry(self._path.name, len(self), self.digest, "", "")

    def name(self, row: int) -> str:
        """`file.csv row 17`. The first row after a header is row 1."""
        return f"{self._path.name} row {row + 1}"

    def base(self, row: int) -> Path:
        """The folder of the file."""
        return self._path.parent

    def _whole(self, key: str) -> bytes | None:
        """The records of a file to hold in memory; None for others."""
        with open_file(self._path) as file:
            if not file.read(2).startswith(UTF_16):
                return None
        try:
            return _held(self._path, key).decode("utf-16").encode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise UserError(f"{key}: {self._path} begins as UTF-16, and is damaged; save it as UTF-8") from None

    def _text(self, number: int) -> str:
        begin, end = self._offsets[number], self._offsets[number + 1]
        if self._held is not None:
            data = self._held[begin:end]
        else:
            data = read_range(self._path, begin, end - begin) if end - begin <= BLOCK_BYTES else b""
        # Paths keep bytes that are not UTF-8. A caption with such bytes is rejected later.
        return data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")

    def _expected(self, number: int) -> int:
        """The number of records of a block."""
        return min(BLOCK, self._records - number * BLOCK)

    @abstractmethod
    def _ends(self, chunk: bytes, state: int) -> tuple[np.ndarray, int]:
        """Offsets of the newlines that end records, and the state in which the next chunk begins."""

    @abstractmethod
    def _block(self, number: int) -> list[Any]:
        """The records of a block."""

    @abstractmethod
    def _rows(self, records: list[Any], columns: Sequence[str]) -> Iterator[Row]:
        """Some columns of each record."""


def _held(path: Path, key: str) -> bytes:
    with open_file(path) as file:
        data = file.read(HELD_BYTES + 1)
    if len(data) > HELD_BYTES:
        raise UserError(f"{key}: {path} has more than {HELD_BYTES} bytes; save it as CSV or JSONL in UTF-8")
    return data


class CsvRows(TextRows):
    """Rows of a file with a header line. All cells are text."""

    headers = 1

    def __init__(self, path: Path, key: str) -> None:
        """As TextRows. Also raises UserError if columns have the same name."""
        super().__init__(path, key)
        if not self._records:
            raise UserError(f"{key}: {path} is empty; its first line should name its columns")
        header = self._text(0).partition("\n")[0].removesuffix("\r")
        if why := next((why for sign, why in _UNREADABLE.items() if sign in header), None):
            raise UserError(f"{key}: {path} {why}")
        # Excel writes tabs in UTF-16, and semicolons where a comma is the decimal point.
        tab = path.suffix.lower() == ".tsv"
        self._delimiter = "\t" if tab else next((each for each in ",;\t" if each in header), ",")
        self._spaced = f"{self._delimiter} " in header
        self._names = [name.strip() for name in self._block(0)[0]]
        if any(name.lower().endswith(SUFFIXES) for name in self._names):
            raise UserError(f"{key}: {path} has no header; its first line should name its columns, as image,caption")
        if len(set(self._names)) < len(self._names):
            raise UserError(f"{key}: {path} has columns of the same name: {', '.join(self._names)}")
        self.columns: Mapping[str, Cells] = dict.fromkeys(self._names, "text")

    def _rows(self, records: list[list[str]], columns: Sequence[str]) -> Iterator[Row]:
        wanted = [(column, self._names.index(column)) for column in columns]
        for cells in records:
            if len(cells) == len(self._names):
                yield {column: cells[at] for column, at in wanted}
            elif not cells:
                yield Unusable("row is empty")
            else:
                yield Unusable(f"row of {how_many(len(cells), 'cell')} under {how_many(len(self._names), 'column')}")

    def _block(self, number: int) -> list[list[str]]:
        csv.field_size_limit(BLOCK_BYTES)
        text = io.StringIO(self._text(number), newline="")
        records = list(csv.reader(text, delimiter=self._delimiter, skipinitialspace=self._spaced))
        expected = self._expected(number)
        if len(records) != expected:
            rows = f"rows {max(number * BLOCK, 1)} to {number * BLOCK + expected - 1}"
            raise UserError(
                f"data.images: {self._path} has a stray quote or carriage return within {rows}; "
                f'a cell that holds either is written in quotes: "a ""b"" c"'
            )
        return records

    def _ends(self, chunk: bytes, state: int) -> tuple[np.ndarray, int]:
        """As TextRows. Newlines within quotes end no record. The state is 1 within quotes, else 0."""
        data = np.frombuffer(chunk, np.uint8)
        ends = data == ord("\n")
        if state or b'"' in chunk:
            inside = (np.cumsum(data == ord('"'), dtype=np.uint8) + np.uint8(state)) & 1
            ends &= inside == 0
            state = int(inside[-1])
        return np.flatnonzero(ends), state


_UNREADABLE = {
    "\0": "is not UTF-8: it has zero bytes, as other encodings do; save it as UTF-8",
    "\r": "ends its lines in a carriage return alone; save it with line feeds",
}
"""Characters that no header of a CSV contains, and what is wrong with a file whose header does."""


class JsonRows(TextRows):
    """Objects of a JSONL file, of a JSON list, or of a mapping from images to captions or objects.

    The columns are the keys of the first rows.
    """

    headers = 0

    def __init__(self, path: Path, key: str) -> None:
        """As TextRows. Also raises UserError for JSON that is no list of objects."""
        super().__init__(path, key)
        if not len(self):
            raise UserError(f"{key}: {path} has no rows")
        rows = [row for row in map(_parsed, self._block(0)) if not isinstance(row, Unusable)]
        self.columns: dict[str, Cells] = {}
        for name, cell in (pair for row in rows for pair in row.items() if pair[1] is not None):
            if self.columns.get(name) not in ("text", "texts"):  # one bad row does not change the column's kind
                self.columns[name] = _kind(cell)
        if not rows:
            lines = how_many(self._expected(0), "line")
            if path.suffix.lower() != ".json" and self._text(0).lstrip().startswith("["):
                raise UserError(
                    f"{key}: {path} holds a list in JSON, and each line of a .jsonl is an object; name it .json"
                )
            first = _parsed(self._block(0)[0])
            raise UserError(
                f"{key}: {path} holds no objects in its first {lines}, the first {first}; a line of JSONL is such as "
                '{"image": "1.png", "caption": "a cat"}'
            )

    def _whole(self, key: str) -> bytes | None:
        if self._path.suffix.lower() != ".json":
            return super()._whole(key)
        data = super()._whole(key) or _held(self._path, key)
        try:
            value = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            if b"}\n{" in data.replace(b"\r", b""):
                return data  # JSONL under another name
            at = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise UserError(f"{key}: {self._path} is not JSON{at}; expected a list of objects") from None
        return "\n".join(json.dumps(row) for row in self._listed(value, key)).encode()

    def _listed(self, value: Any, key: str) -> list[Any]:
        if isinstance(value, list):
            return value
        if isinstance(value, dict) and all(value.keys() & {*names} for names in (IMAGE_COLUMNS, CAPTION_COLUMNS)):
            return [value]
        cells = value.values() if isinstance(value, dict) else [None]
        if all(isinstance(cell, dict) or _kind(cell) in ("text", "texts") for cell in cells):
            rows = ((name, cell if isinstance(cell, dict) else {"caption": cell}) for name, cell in value.items())
            return [{"image": name} | row for name, row in rows]
        what = "annotations of COCO" if isinstance(value, dict) and "annotations" in value else "no list"
        raise UserError(
            f'{key}: {self._path} holds {what}; expected a list such as [{{"image": "1.png", "caption": "a cat"}}]'
        )

    def _ends(self, chunk: bytes, state: int) -> tuple[np.ndarray, int]:
        return np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")), 0

    def _block(self, number: int) -> list[str]:
        return self._text(number).split("\n")[: self._expected(number)]

    def _rows(self, records: list[str], columns: Sequence[str]) -> Iterator[Row]:
        for row in map(_parsed, records):
            yield row if isinstance(row, Unusable) else {column: row.get(column) for column in columns}


def _parsed(line: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        if not line.strip():
            return Unusable("line is empty")
        return Unusable("line ends in a comma" if line.rstrip().endswith("},") else "line is not JSON")
    return value if isinstance(value, dict) else Unusable(f"line holds {type(value).__name__}, not an object")


def _kind(cell: Any) -> Cells:
    listed = isinstance(cell, list)
    first = next(iter(cell), "") if listed else cell
    if isinstance(first, str):
        return "texts" if listed else "text"
    return "numbers" if isinstance(first, int | float) and not isinstance(first, bool) else "other"


def open_rows(path: Path, key: str, kind: SourceKind) -> TextRows:
    """The rows of a CSV, JSON or JSONL file. Raises UserError as CsvRows and JsonRows."""
    return CsvRows(path, key) if kind == "csv" else JsonRows(path, key)


METADATA: Mapping[str, SourceKind] = {
    "metadata.jsonl": "json",
    "metadata.csv": "csv",
    "metadata.parquet": "parquet",
}
_NAMED = 3  # the rows that a message names


def has_metadata(root: Path) -> bool:
    """Whether a folder, or one below it, has a metadata file."""
    return any(name in names for _, _, names in os.walk(root) for name in METADATA)


class Metadata:
    """The rows of the metadata file `name` in the relative `folder` of a source. Each image takes its row out."""

    def __init__(self, folder: str, name: str, config: SourceConfig, key: str) -> None:
        """Read the file. One without columns of files and captions has no rows, and `log_unused` says so.

        Raises UserError if it cannot be read, or lacks the columns of `config`.
        """
        path = config.path / folder / name
        if not config.follow_links and leads_out(config.path, path):
            raise UserError(f"{key}: {path} is a link out of its folder; set follow_links of the source to read it")
        self._folder, self._key, self._where = folder, key, path
        self._rows: dict[str, str] = {}
        self._problems: list[str] = []
        self._nearer: list[str] = []
        kind = METADATA[name]
        rows: Rows = FileRows([path], kind, str(path), key) if kind == "parquet" else open_rows(path, key, kind)
        named = config.image or ("file_name" if "file_name" in rows.columns else None)
        try:
            columns = choose(config.model_copy(update={"image": named}), rows.columns, rows.where, key)
        except UserError as error:
            if config.image or config.captions:
                raise
            self._problems = [f"{problem}; it is ignored" for problem in error.problems]
            return
        for start in range(0, len(rows), BLOCK):
            for number, row in enumerate(rows.read(start, start + BLOCK, columns.names), start):
                if isinstance(row, Unusable) or not (row[columns.image] and isinstance(row[columns.image], str)):
                    why = row if isinstance(row, Unusable) else f"column {columns.image} names no image"
                    self._problems.append(f"{key}: {rows.name(number)}: {why}")
                    continue
                try:
                    captions = json.dumps([[each.text, each.weight] for each in captions_of(row, columns)])
                except Unusable as error:
                    captions = json.dumps(f"{rows.name(number)}: {error}")
                image = _plain(row[columns.image])
                if image in self._rows:
                    self._problems.append(f"{key}: {rows.name(number)}: {image} has an earlier row, which is ignored")
                self._rows[image] = captions

    def row(self, image: str, captioned: bool) -> str | None:
        """Take out the captions of the relative path `image` in JSON, [[text, weight], …], or the problem of its row.

        None for an image that is `captioned` by a file beside it.
        """
        row = self._rows.pop(_plain(image.removeprefix(self._folder)), None)
        if captioned:
            return None
        return row or json.dumps(f"caption is missing: no file beside it, and no row of {self._where.name}")

    def leave(self, image: str) -> None:
        """Take out the row of an image below a folder with metadata of its own."""
        if self._rows.pop(_plain(image.removeprefix(self._folder)), None) is not None:
            self._nearer.append(image)

    def log_unused(self) -> None:
        """Log rows that cannot be read or that another replaced, and those without an image."""
        for problem in self._problems[:_NAMED]:
            log.notice(problem)
        if (more := len(self._problems) - _NAMED) > 0:
            log.notice(f"{self._key}: {self._where} has {how_many(more, 'more such row')}")
        for unused, one, several, what in (
            (self._nearer, "is", "are", "ignored, because nearer metadata counts"),
            (list(self._rows), "names", "name", "no image"),
        ):
            if unused:
                rows, verb = how_many(len(unused), "row"), one if len(unused) == 1 else several
                log.notice(f"{self._key}: {rows} of {self._where} {verb} {what}: {', '.join(unused[:_NAMED])}")


def _plain(name: str) -> str:
    """The name in NFC, without a space at its end, and with slashes for Windows' backslashes."""
    return unicodedata.normalize("NFC", name.rstrip().replace("\\", "/").removeprefix("./"))
