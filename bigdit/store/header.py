"""Reads and checks the header of a safetensors file: the place of each tensor, without its data.

Nothing in it is trusted. Sizes must match the file, offsets must cover it without gaps, and a part must be complete.
Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from bigdit.catalog.families import FILL, LOSS_MASK, REFERENCE
from bigdit.errors import UserError, shown
from bigdit.files import open_file
from bigdit.store.part import FIRST_FRAME, FRAME_COLUMNS, EditShape, Shape, Skipped, parse_shape, part_range, range_text
from bigdit.store.schema import EXTRACT
from bigdit.store.tensors import DTYPES
from bigdit.store.text import TEXT, Cut, Lengths, column_name

LONGEST_HEADER = 16 << 20
"""In bytes. A part of 256 samples has about 2 kB. A damaged length must not take all memory."""

FIRST_READ = 64 << 10
"""Bytes of the first read of a part: header and tables of 256 samples with five captions each."""

Expected = dict[str, tuple[tuple[torch.dtype, ...], tuple[int | None, ...]]]
"""Columns by name: the dtypes that each may have, and its shape. None stands for any size."""

_CUT = TypeAdapter(Cut)
_LENGTHS = TypeAdapter(list[Lengths])
_MOST_ELEMENTS = 1 << 48
_MOST_DIMENSIONS = 8
_STREAM = re.compile(r"stream/[a-z][a-z0-9_]{0,63}")
_SHAPED = re.compile(
    r"(latent|row|label|frame|first_frame|image_embeds|loss_mask|reference|fill)/[1-9]\d{0,8}(x[1-9]\d{0,8}){2,3}(r\d{1,2})?"
)


@dataclass(frozen=True)
class Column:
    """A tensor in a file. Its data begins at byte `offset`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """Columns and metadata of the file at `path`. `start`: its first bytes, with the header and some data."""

    path: Path
    columns: dict[str, Column]
    metadata: dict[str, str]
    nbytes: int
    start: bytes

    def shapes(self) -> dict[Shape, int]:
        """The shapes C×H×W of a part's latents, and the number of samples of each."""
        names = (name for name in self.columns if name.startswith("latent/"))
        return {_shape_of(name): self.columns[name].shape[0] for name in names}

    def sequences(self) -> list[str]:
        """The names of the sequences of each caption: TEXT, if there are captions, and the streams."""
        streams = sorted(name.partition("/")[2] for name in self.columns if name.startswith("stream/"))
        return [TEXT, *streams] if "text" in self.columns else streams

    def skipped(self) -> list[Skipped]:
        """The skipped images of the part's range."""
        try:
            rows = json.loads(self.metadata["skipped"])
            return [Skipped(int(index), _on_a_line(name), _on_a_line(why)) for index, name, why in rows]
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
            raise damaged(self.path, "has a damaged list of skipped images") from None

    def cuts(self) -> list[Cut]:
        """The captions that tokenizers cut."""
        try:
            cuts = [_CUT.validate_python(each) for each in json.loads(self.metadata["cut"])]
            return [replace(cut, samples=[_on_a_line(name) for name in cut.samples]) for cut in cuts]
        except (KeyError, ValueError, TypeError, RecursionError):
            raise damaged(self.path, "has a damaged list of cut captions") from None

    def lengths(self) -> list[Lengths]:
        """The lengths of all captions. Older parts have none."""
        try:
            found = _LENGTHS.validate_python(json.loads(self.metadata.get("lengths", "[]")))
            if not all(each.counts and min(map(min, each.counts)) >= 0 for each in found):
                raise ValueError
            return [replace(each, longest=_on_a_line(each.longest)) for each in found]
        except (ValueError, RecursionError):
            raise damaged(self.path, "has damaged lengths of captions") from None


def damaged(path: Path, what: str) -> UserError:
    """The error for a damaged file of the store."""
    return UserError(f"data.features: {path} {what}; delete it, then {EXTRACT} makes it again")


def read_header(path: Path) -> Header:
    """The header of a safetensors file. Raises UserError if it cannot be read, or does not describe the file."""
    try:
        with open_file(path) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            return header_by(path, lambda offset, nbytes: os.pread(descriptor, nbytes, offset), size)
    except OSError as error:
        raise UserError(f"data.features: {path} cannot be read: {error.strerror}") from None


def header_by(path: Path, read: Callable[[int, int], bytes], size: int) -> Header:
    """The header of a file of `size` bytes, which `read(offset, bytes)` reads. `path` is for errors."""
    start = read(0, FIRST_READ)
    length = int.from_bytes(start[:8], "little")
    if length > LONGEST_HEADER:
        raise damaged(path, f"has a damaged header: {length} bytes long; the limit is {LONGEST_HEADER}")
    if size < 8 + length:
        raise damaged(path, f"is truncated: at least {8 + length} bytes were expected, {size} were found")
    while len(start) < 8 + length:
        more = read(len(start), 8 + length - len(start))
        if not more:
            raise damaged(path, f"is truncated: at least {8 + length} bytes were expected")
        start += more
    return _parsed(path, start, size)


def _parsed(path: Path, start: bytes, size: int) -> Header:
    length = int.from_bytes(start[:8], "little")
    try:
        entries: dict[str, Any] = json.loads(start[8 : 8 + length], object_pairs_hook=_distinct)
        metadata = entries.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata is not text")
        columns = {name: _column(entry, 8 + length) for name, entry in entries.items()}
        end = _end_of(columns.values(), 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f" ({error.args[0]})" if type(error) is ValueError and error.args else ""
        raise damaged(path, f"has a damaged header{why}") from None
    if size != end:
        what = "truncated" if size < end else "too long"
        raise damaged(path, f"is {what}: {end} bytes were expected, {size} were found")
    return Header(path, columns, metadata, 8 + length, start)


def check_part(header: Header, identity: str | None = None) -> None:
    """Raise UserError if a part has another `identity` (None: any) or range, or lacks a column."""
    path, columns, metadata = header.path, header.columns, header.metadata
    if identity is not None and metadata.get("store") != identity:
        raise damaged(path, "belongs to another store: its images, encoders or buckets differ")
    found_range, named = metadata.get("range"), range_text(path.name)
    if found_range != named:
        raise damaged(path, f"is another part: it holds the images {str(found_range)[:40]}, not {named}")
    for name, (dtypes, dims) in (_expected_texts(header) | _expected_latents(header)).items():
        found = columns.get(name)
        if found is None:
            raise damaged(path, f"has a damaged header: {name} is missing")
        fits = len(found.shape) == len(dims) and all(
            want in (None, have) for want, have in zip(dims, found.shape, strict=True)
        )
        if found.dtype not in dtypes or not fits:
            raise damaged(path, f"has a damaged header: {name} is {found.dtype} {list(found.shape)}")


def _expected_texts(header: Header) -> Expected:
    """The columns of digests, captions and texts."""
    path, columns = header.path, header.columns
    captions = columns["caption"].shape[0] if "caption" in columns and columns["caption"].shape else None
    start, end = part_range(path.name) or (0, 0)
    expected: Expected = {
        "digests": ((torch.int64,), (3,)),
        "content": ((torch.int64,), (end - start, 2)),
        "caption": ((torch.int64,), (None, 5)),
        "captions": ((torch.uint8,), (None,)),
    }
    for name in {*header.sequences(), *([TEXT] if captions else [])}:
        if name != TEXT:
            if not _STREAM.fullmatch(f"stream/{name}"):
                raise damaged(path, f"has a damaged header: {f'stream/{name}'[:80]!r} is no name of a stream")
            expected[f"stream/{name}"] = ((torch.int64,), (captions, 3))
        text = column_name("text", name)
        expected[text] = ((torch.bfloat16, torch.float8_e4m3fn), (None, None))
        if text in columns and columns[text].dtype == torch.float8_e4m3fn:
            expected[column_name("text_scale", name)] = ((torch.float32,), (columns[text].shape[0],))
    if "pooled" in columns:
        expected["pooled"] = ((torch.bfloat16,), (captions, None))
    return expected


def _expected_latents(header: Header) -> Expected:
    """The columns of each shape: latents, rows, and if any shape has them, labels and first frames or references."""
    path, columns = header.path, header.columns
    frames = tuple(f"{each}/" for each in ("frame", *FRAME_COLUMNS))
    labelled, framed = (any(name.startswith(kind) for name in columns) for kind in ("label/", frames))
    first, masked, edited, filled = (
        any(name.startswith(f"{kind}/") for name in columns) for kind in (FIRST_FRAME, LOSS_MASK, REFERENCE, FILL)
    )
    expected: Expected = {}
    for name in [name for name in columns if name.startswith(("latent/", "row/", "label/", *frames))]:
        if not _SHAPED.fullmatch(name):
            raise damaged(path, f"has a damaged header: {name[:80]!r} names no shape")
        shape = _shape_of(name)
        latent, row, label = (f"{kind}/{name.partition('/')[2]}" for kind in ("latent", "row", "label"))
        count = columns[latent].shape[0] if latent in columns and columns[latent].shape else None
        deviation = (2,) if latent in columns and len(columns[latent].shape) == len(shape) + 2 else ()
        expected[latent] = ((torch.bfloat16, torch.float32), (None, *deviation, *shape))
        expected[row] = ((torch.int64,), (count, 4))
        if labelled:
            expected[label] = ((torch.int64,), (count,))
        no_edit = isinstance(shape, EditShape) and not shape.references  # among edits
        if framed and (masked or not no_edit):
            sides = name.partition("/")[2]
            expected[f"frame/{sides}"] = ((torch.int64,), (count,))
            if masked:
                expected[f"{LOSS_MASK}/{sides}"] = ((torch.bfloat16,), (count, *shape[-2:]))
            if edited and no_edit:
                continue
            if edited:
                expected[f"{REFERENCE}/{sides}"] = ((torch.bfloat16,), (count, None, shape[0], None, None))
            elif filled:
                expected[f"{FILL}/{sides}"] = ((torch.bfloat16,), (count, None, *shape[-2:]))
            elif first or not masked:
                expected[f"{FIRST_FRAME}/{sides}"] = ((torch.bfloat16,), (count, *shape))
        if framed and name.startswith(FRAME_COLUMNS[1]):
            expected[name] = ((torch.bfloat16,), (count, None, None))
    return expected


def _on_a_line(text: object) -> str:
    """A name or a reason on one line of UTF-8, since file names may have any bytes."""
    return shown(str(text)).replace("\n", "\\n")


def _shape_of(name: str) -> Shape:
    return parse_shape(name.partition("/")[2])


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _column(entry: Mapping[str, Any], data_start: int) -> Column:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < _MOST_ELEMENTS for number in (*shape, *offsets)):
        raise ValueError("sizes and offsets are natural numbers below 2^48")
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    begin, end = offsets
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {str(entry['dtype'])[:20]!r}")
    column = Column(DTYPES[entry["dtype"]], tuple(shape), data_start + begin)
    if column.nbytes != end - begin:
        raise ValueError("shape and bytes disagree")
    return column


def _end_of(columns: Any, start: int) -> int:
    """The end of columns that follow one another from `start` on. Raises ValueError for holes and overlaps."""
    for column in sorted(columns, key=lambda column: (column.offset, column.nbytes)):
        if column.offset != start:
            raise ValueError("offsets overlap or leave a hole")
        start += column.nbytes
    return int(start)
