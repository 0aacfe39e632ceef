"""A part that is open: its tables in memory, its rows read at their offsets into the memory of batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bigdit.errors import UserError
from bigdit.store import fp8
from bigdit.store.digest import bytes_of, chained_digest, row_digest
from bigdit.store.header import Column, Header, check_part, damaged, read_header
from bigdit.store.local import READERS, File, ReaderName
from bigdit.store.part import LABELLED, Shape, part_range, shape_name
from bigdit.store.text import Text


class Part:
    """An open part. `rows`: int64 [n, 4] of each shape, `captions`: int64 [m, 4], as in part.py; `weights`: [m];
    `labels`: int64 [n] of each shape where pictures have classes, else of none."""

    def __init__(self, header: Header, file: File, identity: str | None = None) -> None:
        """Read and check the tables of a file with this header. Raises UserError where they are damaged."""
        check_part(header, identity)
        self.header = header
        self._file = file
        self._latents = {shape: header.columns[f"latent/{shape_name(shape)}"] for shape in header.shapes()}
        self.rows = {shape: self._table(header.columns[f"row/{shape_name(shape)}"]) for shape in self._latents}
        labelled = self._latents if header.metadata["format"] == LABELLED else ()
        self.labels = {shape: self._table(header.columns[f"label/{shape_name(shape)}"]) for shape in labelled}
        self.captions = self._table(header.columns["caption"])
        self.weights = self.captions[:, 2].astype(np.uint32).view(np.float32)
        self._text = header.columns.get("text")
        self._scale = header.columns.get("text_scale")
        self._pooled = header.columns.get("pooled")
        self._check_tables()
        self.header = replace(header, start=b"")  # many parts are open at once

    @classmethod
    def open(cls, path: Path, reader: ReaderName = "pread", identity: str | None = None) -> Part:
        """Open the part at `path`, of this `identity`. Raises UserError where it is damaged or another store's."""
        return cls(read_header(path), READERS[reader](path), identity)

    @property
    def latents_dtype(self) -> torch.dtype:
        """Of all latents as stored."""
        return next(iter(self._latents.values())).dtype

    @property
    def counts(self) -> dict[Shape, int]:
        """Rows of each shape."""
        return {shape: len(rows) for shape, rows in self.rows.items()}

    def has_deviation(self, shape: Shape) -> bool:
        """Whether rows of this shape are mean and deviation, [2, *shape]."""
        return len(self._latents[shape].shape) == len(shape) + 2

    def choose_caption(self, shape: Shape, row: int, draw: float) -> int:
        """The number of one of a row's captions, by their weights and a number in [0, 1)."""
        _, first, count, _ = self.rows[shape][row].tolist()
        if count == 1:
            return int(first)
        sums = np.cumsum(self.weights[first : first + count], dtype=np.float64)
        return int(first + min(np.searchsorted(sums, draw * sums[-1], "right"), count - 1))

    def latents_span(self, shape: Shape, row: int) -> tuple[int, int]:
        """Offset and bytes of a row's latents."""
        column = self._latents[shape]
        return column.offset + row * column.row_bytes, column.row_bytes

    def states_span(self, caption: int) -> tuple[int, int]:
        """Offset and bytes of a caption's states."""
        assert self._text is not None
        width, (start, length) = self._text.row_bytes, self.captions[caption, :2].tolist()
        return self._text.offset + start * width, length * width

    @property
    def is_plain(self) -> bool:
        """Whether texts are states alone, as they stand in the file: no vectors, no scales."""
        return self._scale is None and self._pooled is None

    def tokens(self, caption: int) -> int:
        """Tokens of a caption."""
        return int(self.captions[caption, 1])

    def check_fits(self, caption: int, shape: tuple[int, int]) -> None:
        """Raise UserError where a caption's states do not fit into [max_tokens, dim]."""
        assert self._text is not None
        if self.tokens(caption) > shape[0] or self._text.shape[1] != shape[1]:
            found = (self.tokens(caption), self._text.shape[1])
            raise self._damaged(f"has a caption of {found[0]} × {found[1]}, and at most {shape[0]} × {shape[1]} fits")

    def advise(self, shape: Shape, row: int, caption: int | None) -> None:
        """This row will be read soon, with this caption."""
        self._file.advise(*self.latents_span(shape, row))
        if caption is not None:
            self._file.advise(*self.states_span(caption))

    def read_latents(self, shape: Shape, row: int, memory: memoryview) -> int:
        """Fill `memory` with a row's latents as stored; its source index. Raises UserError where they are damaged."""
        self._file.read_into(memory, self.latents_span(shape, row)[0])
        index, _, _, digest = self.rows[shape][row].tolist()
        if row_digest(index, memory) != digest:
            raise self._damaged(f"is damaged in row {row} of {shape_name(shape)}: its digest differs")
        return int(index)

    def latents(self, shape: Shape, row: int) -> tuple[int, torch.Tensor]:
        """A row's source index and its latents as stored."""
        column = self._latents[shape]
        latents = torch.empty(column.shape[1:], dtype=column.dtype)
        return self.read_latents(shape, row, bytes_of(latents)), latents

    def text(self, caption: int) -> Text:
        """A caption's states [len, dim] and vector [p] in bf16. Raises UserError where they are damaged."""
        assert self._text is not None
        states = torch.empty((int(self.captions[caption, 1]), self._text.shape[1]), dtype=torch.bfloat16)
        return Text(states, self.read_text(caption, states))

    def read_text(self, caption: int, states: torch.Tensor) -> torch.Tensor | None:
        """Fill `states` [len, dim] bf16 with a caption's; its pooled vector [p], where there is one."""
        if self.is_plain:
            self.read_states(caption, bytes_of(states))
            return None
        assert self._text is not None
        start, length = self.captions[caption, :2].tolist()
        stored = states if self._scale is None else torch.empty(states.shape, dtype=fp8.DTYPE)
        self._file.read_into(bytes_of(stored), self.states_span(caption)[0])
        scale = None if self._scale is None else self._read(self._scale, start, length)
        pooled = None if self._pooled is None else self._read(self._pooled, caption, 1)[0]
        self._check_text(caption, [bytes_of(each) for each in (stored, scale, pooled) if each is not None])
        if scale is not None:
            states.copy_(fp8.dequantise(stored, scale))
        return pooled

    def read_states(self, caption: int, memory: memoryview) -> None:
        """Fill `memory` with a caption's states as stored, of a part without scales and vectors."""
        self._file.read_into(memory, self.states_span(caption)[0])
        self._check_text(caption, [memory])

    def damages(self) -> Iterator[str]:
        """Read all of the part; what is wrong with it, a line each."""
        header = self.header
        captions = self._read(header.columns["captions"], 0, header.columns["captions"].shape[0])
        if chained_digest([bytes_of(captions)]) != self._digests[2]:
            yield f"{header.path}: the captions' digest differs"
        for shape, rows in self.rows.items():
            memory = memoryview(bytearray(self._latents[shape].row_bytes))
            yield from self._problems(lambda row: self.read_latents(shape, row, memory), len(rows))  # noqa: B023
        yield from self._problems(self.text, len(self.captions))

    def _problems(self, read: object, count: int) -> Iterator[str]:
        for number in range(count):
            try:
                read(number)  # type: ignore[operator]
            except UserError as error:
                yield str(error)

    def _check_text(self, caption: int, buffers: list[memoryview]) -> None:
        if chained_digest(buffers) != int(self.captions[caption, 3]):
            raise self._damaged(f"is damaged in caption {caption}: its digest differs")

    def _damaged(self, what: str) -> UserError:
        return damaged(self.header.path, what)

    def _read(self, column: Column, first: int, count: int) -> torch.Tensor:
        rows = torch.empty((count, *column.shape[1:]), dtype=column.dtype)
        self._file.read_into(bytes_of(rows), column.offset + first * column.row_bytes)
        return rows

    def _table(self, column: Column) -> npt.NDArray[np.int64]:
        """A table, out of the bytes that came with the header where they reach so far."""
        end = column.offset + column.nbytes
        data = self.header.start[column.offset : end]
        if end > len(self.header.start):
            data = bytes_of(self._read(column, 0, column.shape[0]))  # type: ignore[assignment]
        return np.frombuffer(data, np.int64).reshape(column.shape)

    def _check_tables(self) -> None:
        """Digests of the header and the tables; and bounds, since a digest does not keep malice out."""
        header = self.header
        self._digests = self._table_of(header.columns["digests"])
        tables = [self.captions, *(each[s] for each in (self.rows, self.labels) for s in sorted(each, key=shape_name))]
        found = [chained_digest([header.start[: header.nbytes]]), chained_digest(table.tobytes() for table in tables)]
        if found != self._digests[:2]:
            raise self._damaged("is damaged in its header or tables: their digest differs")
        tokens = 0 if self._text is None else self._text.shape[0]
        start, length = self.captions[:, 0], self.captions[:, 1]
        sound = (start >= 0) & (length >= 0) & (start <= tokens) & (length <= tokens - start)
        sound &= np.isfinite(self.weights) & (self.weights > 0)
        if not sound.all():
            raise self._damaged(f"is damaged in caption {int(np.argmin(sound))}: its place is not in the file")
        least, end = part_range(header.path.name) or (0, np.iinfo(np.int64).max)
        fewest = 0 if self.labels else 1  # captions of a picture
        for shape, rows in self.rows.items():
            index, first, count = rows[:, 0], rows[:, 1], rows[:, 2]
            sound = (index >= least) & (index < end)
            sound &= (first >= 0) & (count >= fewest) & (first <= len(start)) & (count <= len(start) - first)
            if self.labels:
                sound &= self.labels[shape] >= 0
            if not sound.all():
                row = int(np.argmin(sound))
                raise self._damaged(f"is damaged in row {row} of {shape_name(shape)}: it names what the part has not")

    def _table_of(self, column: Column) -> list[int]:
        values: list[int] = self._read(column, 0, column.shape[0]).tolist()
        return values
