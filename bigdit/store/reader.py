"""An open part: its tables are in memory, and its rows are read at their offsets, straight into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bigdit.catalog.families import FILL, REFERENCE
from bigdit.errors import UserError
from bigdit.store.files import File, PreadFile
from bigdit.store.header import Column, Header, check_part, damaged, read_header
from bigdit.store.part import FRAME_COLUMNS, Shape, part_range, shape_name
from bigdit.store.tensors import bytes_of, chained_digest, row_digest
from bigdit.store.text import TEXT, Text, chosen, column_name, dequantise


@dataclass(frozen=True)
class _TextSequence:
    """One sequence of all captions: the columns of its states, and of their scales if they are stored in 8 bits.

    `places`: int64 [m, 3]: first state, number of states, and number of states that the mask shows.
    """

    states: Column
    scale: Column | None
    places: npt.NDArray[np.int64]


class Part:
    """An open part, with the tables of part.py.

    `content`: uint64 [range, 2]. `captions`: int64 [m, 5]. `weights`: [m]. By shape: `rows`, int64 [n, 4]; `labels`,
    int64 [n], if images have classes; `frames`, digests [n] of first frames or references, if any. The sequences of a
    caption are TEXT and `streams`.
    """

    def __init__(self, header: Header, file: File, identity: str | None = None) -> None:
        """Read and check the tables of a file with this header. Raises UserError if they are damaged."""
        check_part(header, identity)
        self.header = header
        self._file = file
        self._latents = {shape: header.columns[f"latent/{shape_name(shape)}"] for shape in header.shapes()}
        self.rows, self.labels, self.frames = (self._tables(kind) for kind in ("row", "label", "frame"))
        self._framed = {shape: self._frame_columns(shape) for shape in self.frames}
        self.content = self._table(header.columns["content"]).view(np.uint64)
        self.captions = self._table(header.columns["caption"])
        self.weights = self.captions[:, 2].astype(np.uint32).view(np.float32)
        self._sequences = {name: self._sequence(name) for name in header.sequences()}
        self._pooled = header.columns.get("pooled")
        self._check_tables()
        self.header = replace(header, start=b"")  # many parts are open at once

    @classmethod
    def open(cls, path: Path, identity: str | None = None) -> Part:
        """Open the part at `path`. Raises UserError if it is damaged or has another `identity`."""
        return cls(read_header(path), PreadFile(path), identity)

    @property
    def latents_dtype(self) -> torch.dtype:
        """The dtype of all latents."""
        return next(iter(self._latents.values())).dtype

    @property
    def counts(self) -> dict[Shape, int]:
        """Rows of each shape."""
        return {shape: len(rows) for shape, rows in self.rows.items()}

    def has_deviation(self, shape: Shape) -> bool:
        """Whether rows of this shape are [2, *shape], mean and deviation."""
        return len(self._latents[shape].shape) == len(shape) + 2

    def choose_caption(self, shape: Shape, row: int, draw: float) -> int:
        """The number of one of a row's captions, chosen by weight with the random number `draw` in [0, 1)."""
        _, first, count, _ = self.rows[shape][row].tolist()
        return int(first) if count == 1 else int(first) + chosen(self.weights[first : first + count], draw)

    def last_caption(self, shape: Shape, row: int) -> int:
        """The number of a row's last caption, which stands for a dropped one if texts depend on images."""
        _, first, count, _ = self.rows[shape][row].tolist()
        return int(first + count - 1)

    def latents_span(self, shape: Shape, row: int) -> tuple[int, int]:
        """Offset and bytes of a row's latents."""
        column = self._latents[shape]
        return column.offset + row * column.row_bytes, column.row_bytes

    @property
    def streams(self) -> list[str]:
        """The names of the sequences besides the text itself."""
        return [name for name in self._sequences if name != TEXT]

    def states_span(self, caption: int, name: str = TEXT) -> tuple[int, int]:
        """Offset and bytes of the states of a caption's sequence."""
        column, start = self._sequences[name].states, int(self._sequences[name].places[caption, 0])
        return column.offset + start * column.row_bytes, self.tokens(caption, name) * column.row_bytes

    def tokens(self, caption: int, name: str = TEXT) -> int:
        """States of a caption's sequence."""
        return int(self._sequences[name].places[caption, 1])

    def shown(self, caption: int, name: str = TEXT) -> int:
        """The number of these states that the mask shows."""
        return int(self._sequences[name].places[caption, 2])

    def check_fits(self, caption: int, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Raise UserError if the states of a caption's sequences do not fit into their [max_tokens, dim]."""
        for name, shape in shapes.items():
            found = self.tokens(caption, name), self._sequences[name].states.shape[1]
            if found[0] > shape[0] or found[1] != shape[1]:
                what = "a caption" if name == TEXT else f"a caption's {name}"
                raise self._damaged(f"has {what} of {found[0]} × {found[1]}; the limit is {shape[0]} × {shape[1]}")

    def advise(self, shape: Shape, row: int, caption: int | None) -> None:
        """Prefetch this row with this caption."""
        self._file.advise(*self.latents_span(shape, row))
        for column in self._framed.get(shape, {}).values():
            self._file.advise(column.offset + row * column.row_bytes, column.row_bytes)
        if caption is not None:
            for name in self._sequences:
                self._file.advise(*self.states_span(caption, name))

    def read_latents(self, shape: Shape, row: int, memory: memoryview) -> int:
        """Fill `memory` with a row's latents as stored, and return its source index. Raises UserError if damaged."""
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

    def frame_shapes(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of the columns of first frames or references for latents of this shape."""
        return {name: column.shape[1:] for name, column in self._framed.get(shape, {}).items()}

    def read_frame(self, shape: Shape, row: int, memories: Mapping[str, memoryview]) -> None:
        """Fill the memory of each name of `frame_shapes` with a row's values. Raises UserError if damaged."""
        for name, column in self._framed[shape].items():
            self._file.read_into(memories[name], column.offset + row * column.row_bytes)
        found = chained_digest([memories[name] for name in self._framed[shape]], int(self.rows[shape][row, 0]))
        if found != int(self.frames[shape][row]):
            names = {REFERENCE: "reference", FILL: "masked image"}
            what = next((what for name, what in names.items() if name in memories), "first frame")
            raise self._damaged(f"is damaged in the {what} of row {row} of {shape_name(shape)}: its digest differs")

    def text(self, caption: int) -> Text:
        """A caption's states [len, dim] and vector [p] in bf16. Raises UserError if they are damaged."""
        states = {
            name: torch.empty((self.tokens(caption, name), each.states.shape[1]), dtype=torch.bfloat16)
            for name, each in self._sequences.items()
        }
        pooled = self.read_text(caption, {name: bytes_of(each) for name, each in states.items()})
        texts = {name: Text(each, unmasked=self._unmasked(caption, name)) for name, each in states.items()}
        return replace(texts.pop(TEXT), pooled=pooled, streams=texts)

    def read_text(self, caption: int, memories: Mapping[str, memoryview]) -> torch.Tensor | None:
        """Fill the memory of each sequence with the caption's states [len, dim] in bf16, and return its vector [p].

        Raises UserError if they are damaged.
        """
        pooled = None if self._pooled is None else self._read(self._pooled, caption, 1)[0]
        read, packed = [], []
        for name, sequence in self._sequences.items():
            memory = memories[name]
            if sequence.scale is None:
                self._file.read_into(memory, self.states_span(caption, name)[0])
                read.append(memory)
            else:
                start, count = int(sequence.places[caption, 0]), self.tokens(caption, name)
                values, scale = (self._read(each, start, count) for each in (sequence.states, sequence.scale))
                read += [bytes_of(values), bytes_of(scale)]
                packed.append((memory, values, scale))
            if name == TEXT and pooled is not None:
                read.append(bytes_of(pooled))
        if chained_digest(read) != int(self.captions[caption, 3]):
            raise self._damaged(f"is damaged in caption {caption}: its digest differs")
        for memory, values, scale in packed:
            memory[:] = bytes_of(dequantise(values, scale))
        return pooled

    def damages(self) -> Iterator[str]:
        """Read the whole part. Yields a message for each damage."""
        header = self.header
        captions = self._read(header.columns["captions"], 0, header.columns["captions"].shape[0])
        if chained_digest([bytes_of(captions)]) != self._digests[2]:
            yield f"{header.path}: the captions' digest differs"
        for shape, rows in self.rows.items():
            memory = memoryview(bytearray(self._latents[shape].row_bytes))
            yield from self._problems(lambda row: self.read_latents(shape, row, memory), len(rows))  # noqa: B023
        for shape, columns in self._framed.items():
            rooms = {name: memoryview(bytearray(column.row_bytes)) for name, column in columns.items()}
            yield from self._problems(lambda row: self.read_frame(shape, row, rooms), len(self.rows[shape]))  # noqa: B023
        yield from self._problems(self.text, len(self.captions))

    def _problems(self, read: Callable[[int], object], count: int) -> Iterator[str]:
        for number in range(count):
            try:
                read(number)
            except UserError as error:
                yield str(error)

    def _frame_columns(self, shape: Shape) -> dict[str, Column]:
        columns = {name: self.header.columns.get(f"{name}/{shape_name(shape)}") for name in FRAME_COLUMNS}
        return {name: column for name, column in columns.items() if column is not None}

    def _sequence(self, name: str) -> _TextSequence:
        columns = self.header.columns
        places = self.captions[:, [0, 1, 4]] if name == TEXT else self._table(columns[f"stream/{name}"])
        return _TextSequence(columns[column_name("text", name)], columns.get(column_name("text_scale", name)), places)

    def _unmasked(self, caption: int, name: str) -> int | None:
        shown = self.shown(caption, name)
        return None if shown == self.tokens(caption, name) else shown

    def _damaged(self, what: str) -> UserError:
        return damaged(self.header.path, what)

    def _read(self, column: Column, first: int, count: int) -> torch.Tensor:
        rows = torch.empty((count, *column.shape[1:]), dtype=column.dtype)
        self._file.read_into(bytes_of(rows), column.offset + first * column.row_bytes)
        return rows

    def _tables(self, kind: str) -> dict[Shape, npt.NDArray[np.int64]]:
        """The tables of one kind, by shape."""
        names = {shape: f"{kind}/{shape_name(shape)}" for shape in self._latents}
        columns = self.header.columns
        return {shape: self._table(columns[name]) for shape, name in names.items() if name in columns}

    def _table(self, column: Column) -> npt.NDArray[np.int64]:
        """A table. It is not read again if the bytes that were read with the header contain it."""
        end = column.offset + column.nbytes
        data = self.header.start[column.offset : end]
        if end > len(self.header.start):
            data = bytes_of(self._read(column, 0, column.shape[0]))  # type: ignore[assignment]
        return np.frombuffer(data, np.int64).reshape(column.shape)

    def _check_tables(self) -> None:
        """Check digests of the header and the tables. Check bounds too, since a hostile file may have right digests."""
        header = self.header
        self._digests = self._read(header.columns["digests"], 0, 3).tolist()
        tables = [self.content, self.captions]
        tables += [each[s] for each in (self.rows, self.labels) for s in sorted(each, key=shape_name)]
        tables += [self._sequences[name].places for name in self.streams]
        tables += [self.frames[shape] for shape in sorted(self.frames, key=shape_name)]
        found = [chained_digest([header.start[: header.nbytes]]), chained_digest(table.tobytes() for table in tables)]
        if found != self._digests[:2]:
            raise self._damaged("is damaged in its header or tables: the digest differs")
        sound = np.isfinite(self.weights) & (self.weights > 0)
        for sequence in self._sequences.values():
            tokens, (start, length, shown) = sequence.states.shape[0], sequence.places.T
            sound &= (start >= 0) & (length >= 0) & (start <= tokens) & (length <= tokens - start)
            sound &= (shown >= 0) & (shown <= length)
        if not sound.all():
            raise self._damaged(f"is damaged in caption {int(np.argmin(sound))}: its place is not in the file")
        least, end = part_range(header.path.name) or (0, np.iinfo(np.int64).max)
        fewest, captions = 0 if self.labels else 1, len(self.captions)  # captions of an image; of all images
        for shape, rows in self.rows.items():
            index, first, count = rows[:, 0], rows[:, 1], rows[:, 2]
            sound = (index >= least) & (index < end)
            sound &= (first >= 0) & (count >= fewest) & (first <= captions) & (count <= captions - first)
            if self.labels:
                sound &= self.labels[shape] >= 0
            if not sound.all():
                row = int(np.argmin(sound))
                raise self._damaged(f"is damaged in row {row} of {shape_name(shape)}: its values are out of range")
