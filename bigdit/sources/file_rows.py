"""Rows of Parquet or Arrow files, one file after another; pictures within them are read one by one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import xxhash

from bigdit.errors import UserError
from bigdit.files import lfs_pointer
from bigdit.sources import arrow_file, parquet_file
from bigdit.sources.arrow_file import cells_of
from bigdit.sources.columns import Cells
from bigdit.sources.protocol import Entry, Unusable
from bigdit.sources.rows import FilePicture, Row

Format = Literal["parquet", "arrow"]
_FILES = {"parquet": parquet_file, "arrow": arrow_file}

TEXT_ROWS, PICTURE_ROWS = 1024, 16  # decoded at a time


@dataclass(frozen=True)
class CellPicture:
    """A picture within a table: a cell of bytes, or of bytes and path, one of them null."""

    format: Format
    path: Path
    row: int
    column: str

    def read(self) -> bytes:
        """Raises Unusable where the cell is empty; otherwise as FilePicture."""
        rows = _read(self.format, self.path, self.row, self.row + 1, [self.column], PICTURE_ROWS)
        try:
            cell: Any = rows.column(0)[0].as_py()
        except UnicodeDecodeError:
            raise Unusable(f"column {self.column} has a path that is not UTF-8") from None
        if isinstance(cell, dict):
            if cell["bytes"] is None and cell.get("path"):
                return FilePicture(self.path.parent / cell["path"]).read()
            cell = cell["bytes"]
        if not cell:
            raise Unusable(f"column {self.column} holds no picture")
        return bytes(cell)


class FileRows:
    """Rows of all files, whose columns must agree. `digest` is that of names and of what describes their contents."""

    def __init__(self, paths: Sequence[Path], file_format: Format, where: str, key: str) -> None:
        """Read the files' footers or headers. Raises UserError where a file is damaged or its columns differ."""
        self.where = where
        self._paths, self._format = list(paths), file_format
        self.columns: Mapping[str, Cells] = {}
        self._entries: list[Entry] = []
        digest = xxhash.xxh3_128()
        counts: list[int] = []
        for path in self._paths:
            try:
                count, schema, contents = _FILES[file_format].describe(path)
                columns = cells_of(schema)
            except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: names that are not UTF-8
                why = lfs_pointer(path) or f"{path} is not read as {file_format}: {_line(error)}"
                raise UserError(f"{key}: {why}") from None
            if counts and columns != self.columns:
                differ = sorted(dict(columns.items() ^ self.columns.items()))
                raise UserError(f"{key}: {path} differs from {self._paths[0]} in the columns {', '.join(differ)}")
            self.columns = columns
            counts.append(count)
            self._entries.append(Entry(path.name, count, contents, "", str(path.stat().st_mtime_ns)))
            digest.update(f"{path.name} {count} {contents}\n".encode("utf-8", "surrogateescape"))
        self._ends = list(itertools.accumulate(counts))
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, end: int, columns: Sequence[str]) -> list[Row]:
        """Rows [start, end)."""
        found: list[Row] = []
        while start < min(end, len(self)):
            path, row, last = self._at(start, end)
            found += self._rows(path, row, last, columns)
            start += last - row
        return found

    def entries(self) -> Iterator[Entry]:
        """The files."""
        return iter(self._entries)

    def name(self, row: int) -> str:
        """`train-00000-of-00002.parquet row 17`; the first row of a file is row 0."""
        path, row, _ = self._at(row, row)
        return f"{path.name} row {row}"

    def base(self, row: int) -> Path:
        """The folder of the row's file."""
        return self._at(row, row)[0].parent

    def _at(self, row: int, end: int) -> tuple[Path, int, int]:
        """The file of a row, the row's number there, and that of `end` or of the file's end."""
        number = bisect.bisect_right(self._ends, row)
        first = self._ends[number - 1] if number else 0
        return self._paths[number], row - first, min(end, self._ends[number]) - first

    def _rows(self, path: Path, start: int, end: int, columns: Sequence[str]) -> Iterator[Row]:
        pictures = [column for column in columns if self.columns[column] == "picture"]
        texts = [column for column in columns if column not in pictures]
        for number, row in enumerate(_pylist(_read(self._format, path, start, end, texts, TEXT_ROWS)), start):
            if not isinstance(row, Unusable):
                row.update({column: CellPicture(self._format, path, number, column) for column in pictures})
            yield row


def _read(file_format: Format, path: Path, start: int, end: int, columns: Sequence[str], batch_rows: int) -> pa.Table:
    try:
        return _FILES[file_format].read(path, start, end, columns, batch_rows)
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: texts of errors that are not UTF-8
        raise UserError(
            f"data.images: rows {start} to {end - 1} of {path} cannot be read: {_line(error)}; run again to go on, or "
            f"replace the file"
        ) from None


def _pylist(table: pa.Table) -> Iterator[Any]:
    """Rows as dicts; those that hold text that is no UTF-8, which Parquet does not check, as Unusable."""
    try:
        yield from table.to_pylist()
    except UnicodeDecodeError:
        for row in range(table.num_rows):
            try:
                yield table.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield Unusable("row of text that is not UTF-8")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
