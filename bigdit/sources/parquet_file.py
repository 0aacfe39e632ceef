"""One Parquet file read forward: a few batches of rows are held, and one page of each column, which pyarrow decodes as
a whole: at most 1024 rows as its writer cuts them, and a row group where that has fewer."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from bigdit.files import open_file

STREAM_BYTES = 2**20  # read at a time of each column, instead of all of it that a row group holds
OPEN = 4  # cursors that a process keeps


def describe(path: Path) -> tuple[int, pa.Schema, str]:
    """Rows, schema, and the digest of the footer, which holds sizes and offsets of all columns, and as a rule their
    least and greatest values. Raises OSError or ArrowException for what is no Parquet file."""
    with open_file(path) as file, pq.ParquetFile(file) as parquet:
        if parquet.metadata.num_rows < 0:
            raise pa.ArrowInvalid("its footer counts less than no rows")
        size = file.seek(0, 2)
        file.seek(size - 8)
        footer = int.from_bytes(file.read(4), "little")
        file.seek(max(size - 8 - footer, 0))
        return parquet.metadata.num_rows, parquet.schema_arrow, xxhash.xxh3_128_hexdigest(file.read(footer))


def read(path: Path, start: int, end: int, columns: Sequence[str], batch_rows: int) -> pa.Table:
    """Columns of the rows [start, end). Quick where calls go forward: a process goes on where it was in a file."""
    key = (path, path.stat().st_mtime_ns, tuple(columns), batch_rows)
    with _lock:
        cursor = _cursors.pop(key, None)
        if cursor is None or not cursor.reaches(start):
            cursor = _Cursor(path, columns, batch_rows, start)
        _cursors[key] = cursor  # the last used is the last to go
        while len(_cursors) > OPEN:
            del _cursors[next(iter(_cursors))]
        return cursor.rows(start, end)


class _Cursor:
    """Batches from the row group of `start` on; the latest two stay, for readers that are a little behind."""

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
        """Whether going on is how to come to `start`: it is not behind, nor beyond another row group's begin."""
        first = self._kept[0][0] if self._kept else self._end
        groups = bisect.bisect_right(self._group_ends, start) - bisect.bisect_right(self._group_ends, self._end)
        return first <= start and groups <= 0

    def rows(self, start: int, end: int) -> pa.Table:
        """Rows [start, end)."""
        found = [_part(first, batch, start, end) for first, batch in self._kept]
        while self._end < end:
            batch = next(self._batches, None)
            if batch is None:
                raise pa.ArrowInvalid(f"it ends at row {self._end}, and its footer counts more")
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
