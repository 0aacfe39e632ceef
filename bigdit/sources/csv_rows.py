"""CSV (RFC 4180) and TSV files read at offsets: the file is scanned once, and one offset in 1024 rows is kept."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from bigdit.errors import UserError
from bigdit.files import lfs_pointer, open_file
from bigdit.sources.disk import read_range
from bigdit.sources.protocol import Entry, Unusable
from bigdit.sources.rows import Cells, Row
from bigdit.units import how_many

BLOCK = 1024  # rows that are read at a time
BLOCK_BYTES = 2**28  # 256 KiB a row: more is a quote that was never closed
CHUNK_BYTES = 2**22


class CsvRows:
    """Rows of a file with a header line; all cells are text. `digest` is that of its bytes."""

    def __init__(self, path: Path, key: str) -> None:
        """Scan the file. Raises UserError where it is missing, empty, or its quotes do not close."""
        self.where = str(path)
        self._path = path
        self._delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        digest = xxhash.xxh3_128()
        # Where each block of records begins, the header being the first record; then the end of the file.
        self._offsets = array("Q", [0])
        records = size = quotes = 0
        last = b"\n"
        try:
            with open_file(path) as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    ends, quotes = _record_ends(chunk, quotes)
                    # The record after the one that ends a block begins a block.
                    self._offsets.extend((size + 1 + ends[BLOCK - 1 - records % BLOCK :: BLOCK]).tolist())
                    records, size, last = records + len(ends), size + len(chunk), chunk[-1:]
        except FileNotFoundError:
            raise UserError(f"{key}: the file {path} does not exist") from None
        except OSError as error:
            raise UserError(f"{key}: {path} cannot be read: {error.strerror}") from None
        if quotes:
            raise UserError(f'{key}: a quote in {path} is never closed; a " within quotes is written ""')
        self._records = records + (last != b"\n")
        if self._offsets[-1] != size:
            self._offsets.append(size)
        self.digest = digest.hexdigest()
        if pointer := lfs_pointer(path):
            raise UserError(f"{key}: {pointer}")
        if not self._records:
            raise UserError(f"{key}: {path} is empty; its first line should name its columns")
        self._names = [name.strip() for name in self._block(0)[0]]
        if len(set(self._names)) < len(self._names):
            raise UserError(f"{key}: {path} has columns of the same name: {', '.join(self._names)}")
        self.columns: Mapping[str, Cells] = dict.fromkeys(self._names, "text")

    def __len__(self) -> int:
        return self._records - 1

    def read(self, start: int, end: int, columns: Sequence[str]) -> list[Row]:
        """Rows [start, end)."""
        first, last = start + 1, min(end + 1, self._records)  # after the header
        wanted = [(column, self._names.index(column)) for column in columns]
        found: list[Row] = []
        for block in range(first // BLOCK, -(-last // BLOCK)):
            begin = block * BLOCK
            for cells in self._block(block)[max(first - begin, 0) : last - begin]:
                if len(cells) == len(self._names):
                    found.append({column: cells[at] for column, at in wanted})
                else:
                    columns_there = how_many(len(self._names), "column")
                    found.append(Unusable(f"row of {how_many(len(cells), 'cell')} under {columns_there}"))
        return found

    def entries(self) -> Iterator[Entry]:
        """The file, whose digest tells all of it."""
        yield Entry(self._path.name, len(self), self.digest, "", "")

    def name(self, row: int) -> str:
        """`file.csv row 17`; the first below the header is row 1."""
        return f"{self._path.name} row {row + 1}"

    def base(self, row: int) -> Path:
        """The folder of the file."""
        return self._path.parent

    def _block(self, number: int) -> list[list[str]]:
        begin, end = self._offsets[number], self._offsets[number + 1]
        expected = min(BLOCK, self._records - number * BLOCK)
        data = read_range(self._path, begin, end - begin) if end - begin <= BLOCK_BYTES else b""
        # Bytes that are not UTF-8 stay what they are in paths; a caption that has some is refused by itself.
        text = data.decode("utf-8", "surrogateescape")
        csv.field_size_limit(BLOCK_BYTES)
        records = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=self._delimiter))
        if len(records) != expected:
            rows = f"rows {max(number * BLOCK, 1)} to {number * BLOCK + expected - 1}"
            raise UserError(
                f"data.images: {self._path} has a stray quote or carriage return within {rows}; "
                f'a cell that holds either is written in quotes: "a ""b"" c"'
            )
        return records


def _record_ends(chunk: bytes, quotes: int) -> tuple[np.ndarray, int]:
    """Offsets of the newlines that end records, those outside quotes, and 1 where the chunk ends inside quotes;
    `quotes` is that of the chunk before."""
    data = np.frombuffer(chunk, np.uint8)
    ends = data == ord("\n")
    if quotes or b'"' in chunk:
        inside = (np.cumsum(data == ord('"'), dtype=np.uint8) + np.uint8(quotes)) & 1
        ends &= inside == 0
        quotes = int(inside[-1])
    return np.flatnonzero(ends), quotes
