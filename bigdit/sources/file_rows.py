"""Rows of Parquet or Arrow files. Images in them are read one by one.

A Parquet file is read forward. Memory holds a few batches of rows and one page of each column (at most 1024 rows),
since pyarrow decodes whole pages. An Arrow stream file, as `datasets` saves it, is mapped into memory. If such a file
is cut while it is read, the process ends with SIGBUS. The same command then resumes.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from bigdit.errors import UserError
from bigdit.files import lfs_pointer, open_file
from bigdit.sources.protocol import Entry, Unusable, cut
from bigdit.sources.tables import Cells, ImageFile, Row

STREAM_BYTES = 2**20  # read at a time of each column, instead of its whole row group
OPEN = 4  # cursors that a process keeps


def describe_parquet(path: Path) -> tuple[int, pa.Schema, str]:
    """Rows, schema, and the digest of the footer, which has the sizes and offsets of all columns, and mostly their
    ranges. Raises OSError or ArrowException for other files."""
    with open_file(path) as file, pq.ParquetFile(file) as parquet:
        if parquet.metadata.num_rows < 0:
            raise pa.ArrowInvalid("its footer has a negative number of rows")
        size = file.seek(0, 2)
        file.seek(size - 8)
        footer = int.from_bytes(file.read(4), "little")
        file.seek(max(size - 8 - footer, 0))
        return parquet.metadata.num_rows, parquet.schema_arrow, xxhash.xxh3_128_hexdigest(file.read(footer))


def read_parquet(path: Path, start: int, end: int, columns: Sequence[str], batch_rows: int) -> pa.Table:
    """Columns of the rows [start, end). Calls that go forward in a file are fast, since its cursor is kept."""
    key = (path, path.stat().st_mtime_ns, tuple(columns), batch_rows)
    with _lock:
        cursor = _cursors.pop(key, None)
        if cursor is None or not cursor.reaches(start):
            cursor = _Cursor(path, columns, batch_rows, start)
        _cursors[key] = cursor  # the least recently used goes first
        while len(_cursors) > OPEN:
            del _cursors[next(iter(_cursors))]
        return cursor.rows(start, end)


class _Cursor:
    """Batches from the row group of `start` on. The latest two stay, for readers a little behind."""

    def __init__(self, path: Path, columns: Sequence[str], batch_rows: int, start: int) -> None:
        file = pq.ParquetFile(path, buffer_size=STREAM_BYTES, pre_buffer=False)
        counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._group_ends = list(itertools.accumulate(counts))
        group = bisect.bisect_right(self._group_ends, start)
        self._end = self._group_ends[group - 1] if group else 0
        self._batches: Iterator[pa.RecordBatch] = file.iter_batches(
            batch_rows, row_groups=list(range(group, len(counts))), columns=list(columns), use_threads=False
        )
        self._kept: deque[tuple[int, pa.RecordBatch]] = deque(maxlen=2)

    def reaches(self, start: int) -> bool:
        """Whether reading forward is the shortest way to `start`: it is not behind, and in the same row group."""
        first = self._kept[0][0] if self._kept else self._end
        groups = bisect.bisect_right(self._group_ends, start) - bisect.bisect_right(self._group_ends, self._end)
        return first <= start and groups <= 0

    def rows(self, start: int, end: int) -> pa.Table:
        """Rows [start, end)."""
        found = [_part(first, batch, start, end) for first, batch in self._kept]
        while self._end < end:
            batch = next(self._batches, None)
            if batch is None:
                raise pa.ArrowInvalid(f"it ends at row {self._end}, before its footer's count")
            self._kept.append((self._end, batch))
            found.append(_part(self._end, batch, start, end))
            self._end += batch.num_rows
        return pa.Table.from_batches([part for part in found if part.num_rows], found[0].schema)


def _part(first: int, batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
    """The rows of [start, end) in a batch that begins at row `first`."""
    begin = min(max(start - first, 0), batch.num_rows)
    return batch.slice(begin, max(min(end - first, batch.num_rows) - begin, 0))


_lock = threading.Lock()
_cursors: dict[tuple[Path, int, tuple[str, ...], int], _Cursor] = {}


# Uncompressed files are not copied. Compressed buffers could fill any amount of memory.
COPIED_BYTES = 2**20
# Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format, the end-of-stream marker
END = b"\xff\xff\xff\xff\0\0\0\0"

# The pool must outlive everything that is allocated from it.
_POOL = pa.proxy_memory_pool(pa.default_memory_pool())


def describe_arrow(path: Path) -> tuple[int, pa.Schema, str]:
    """Rows, schema, and the digest of the sizes of file and batches. Raises as `describe_parquet`."""
    size = path.stat().st_size
    with open_file(path) as file:
        file.seek(max(size - len(END), 0))
        if file.read() != END:
            raise pa.ArrowInvalid("the end of its stream is missing: it was cut, or is still being written")
    table = _map(path)
    sizes = [batch.num_rows for batch in table.to_batches()]
    return table.num_rows, table.schema, xxhash.xxh3_128_hexdigest(f"{size} {sizes}".encode())


def read_arrow(path: Path, start: int, end: int, columns: Sequence[str], batch_rows: int) -> pa.Table:
    """Columns of the rows [start, end)."""
    rows = _mapped(path, path.stat().st_mtime_ns).select(list(columns)).slice(start, end - start)
    rows.validate(full=True)  # damaged offsets may point outside the buffers
    return rows


@functools.lru_cache(maxsize=8)
def _mapped(path: Path, _changed: int) -> pa.Table:
    return _map(path)


def _map(path: Path) -> pa.Table:
    batches = []
    with pa.ipc.open_stream(pa.memory_map(str(path)), memory_pool=_POOL) as reader:
        for batch in reader:
            if _POOL.bytes_allocated() > COPIED_BYTES:
                raise pa.ArrowInvalid("compressed Arrow files are not supported; save_to_disk writes them uncompressed")
            batches.append(batch)
        return pa.Table.from_batches(batches, reader.schema)


def cells_of(schema: pa.Schema) -> dict[str, Cells]:
    """The kind of cells of each column."""
    return {field.name: _cells(field.type) for field in schema}


def _cells(kind: pa.DataType) -> Cells:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_text(kind):
        return "text"
    if _is_list(kind) and _is_text(kind.value_type):
        return "texts"
    if _is_number(kind) or (_is_list(kind) and _is_number(kind.value_type)):
        return "numbers"
    if _is_bytes(kind) or is_image_struct(kind):
        return "image"
    return "other"


def is_image_struct(kind: pa.DataType) -> bool:
    """Whether a type is Hugging Face's Image: the file's bytes, or null and a path."""
    return pa.types.is_struct(kind) and any(field.name == "bytes" and _is_bytes(field.type) for field in kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


Format = Literal["parquet", "arrow"]

TEXT_ROWS, IMAGE_ROWS = 1024, 16  # decoded at a time


@dataclass(frozen=True)
class ImageCell:
    """An image in a table: a cell of bytes, or of bytes and a path, one of them null."""

    format: Format
    path: Path
    row: int
    column: str

    def read(self) -> bytes:
        """The bytes of the image. Raises Unusable if the cell is empty; otherwise as ImageFile."""
        rows = _read(self.format, self.path, self.row, self.row + 1, [self.column], IMAGE_ROWS)
        try:
            cell: Any = rows.column(0)[0].as_py()
        except UnicodeDecodeError:
            raise Unusable(f"column {self.column} has a path that is not UTF-8") from None
        if isinstance(cell, dict):
            if cell["bytes"] is None and cell.get("path"):
                return ImageFile(self.path.parent / cell["path"], relative=not Path(cell["path"]).is_absolute()).read()
            cell = cell["bytes"]
        if not cell:
            raise Unusable(f"column {self.column} holds no image")
        return bytes(cell)


class FileRows:
    """Rows of all files, whose columns must agree. `digest` covers their names, counts and descriptions."""

    def __init__(self, paths: Sequence[Path], file_format: Format, where: str, key: str) -> None:
        """Read the files' footers or headers. Raises UserError if a file is damaged or its columns differ."""
        self.where = where
        self._paths, self._format = list(paths), file_format
        self.columns: Mapping[str, Cells] = {}
        self._entries: list[Entry] = []
        digest = xxhash.xxh3_128()
        counts: list[int] = []
        for path in self._paths:
            try:
                count, schema, contents = _DESCRIBE[file_format](path)
                columns = cells_of(schema)
            except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: names that are not UTF-8
                why = lfs_pointer(path) or f"{path} cannot be read as {file_format}: {_line(error)}"
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
        for number, _, begin, stop in cut(self._ends, start, end):
            found += self._rows(self._paths[number], begin, stop, columns)
        return found

    def entries(self) -> Iterator[Entry]:
        """The files."""
        return iter(self._entries)

    def name(self, row: int) -> str:
        """`train-00000-of-00002.parquet row 17`. The first row of a file is row 1, as in all messages."""
        ((number, _, begin, _),) = cut(self._ends, row, row + 1)
        return f"{self._paths[number].name} row {begin + 1}"

    def base(self, row: int) -> Path:
        """The folder of the row's file."""
        return self._paths[bisect.bisect_right(self._ends, row)].parent

    def _rows(self, path: Path, start: int, end: int, columns: Sequence[str]) -> Iterator[Row]:
        images = [column for column in columns if self.columns[column] == "image"]
        texts = [column for column in columns if column not in images]
        for number, row in enumerate(_pylist(_read(self._format, path, start, end, texts, TEXT_ROWS)), start):
            if not isinstance(row, Unusable):
                row.update({column: ImageCell(self._format, path, number, column) for column in images})
            yield row


def _read(file_format: Format, path: Path, start: int, end: int, columns: Sequence[str], batch_rows: int) -> pa.Table:
    try:
        return _READ[file_format](path, start, end, columns, batch_rows)
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: texts of errors that are not UTF-8
        raise UserError(
            f"data.images: rows {start + 1} to {end} of {path} cannot be read: {_line(error)}; run again to resume, or "
            f"replace the file"
        ) from None


def _pylist(table: pa.Table) -> Iterator[Any]:
    """Rows as dicts. Rows with text that is not UTF-8 are Unusable, since Parquet does not check text."""
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


_DESCRIBE = {"parquet": describe_parquet, "arrow": describe_arrow}
_READ = {"parquet": read_parquet, "arrow": read_arrow}
