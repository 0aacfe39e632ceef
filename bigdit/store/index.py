"""How many samples of each shape every part has: read from all headers once, and kept in `index.safetensors`.

A copy of what the headers say, for starts: a hundred thousand headers take minutes on a cold disk. It can be deleted at
any time. What it lacks is read, as is a part of other bytes, and a part that is opened is held against it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bigdit.errors import UserError
from bigdit.store.digest import bytes_of, chained_digest
from bigdit.store.header import Header, check_part, damaged, read_header
from bigdit.store.local import read_column
from bigdit.store.part import Shape, parse_shape, part_name, shape_name
from bigdit.store.schema import StoreSchema, part_identity, store_identity
from bigdit.store.tensors import commit_tensors

FILE = "index.safetensors"
_READERS = 8  # headers are read side by side: a network's latency, not the disk's bandwidth, is what they take


@dataclass(frozen=True)
class Index:
    """`parts` int64 [parts, 3]: source indices [start, end) and bytes; `counts` int64 [parts, shapes] of samples."""

    shapes: tuple[Shape, ...]
    parts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


def load_index(
    root: Path, wanted: npt.NDArray[np.int64], header_of: Callable[[str], Header], schema: StoreSchema
) -> Index:
    """The index of `wanted` parts (start, end, bytes): by the file where it has them, by their headers otherwise.

    Writes the file anew where it lacked any. Raises UserError where a header is damaged or of another store.
    """
    identity = store_identity(schema)
    saved = read_index(root / FILE, identity)
    if saved is not None and np.array_equal(saved.parts, wanted):
        return saved
    parts = [tuple(each) for each in wanted.tolist()]
    counts: list[dict[Shape, int]] = [{} for _ in parts]
    known = {} if saved is None else {tuple(each): row for row, each in enumerate(saved.parts.tolist())}
    new = [number for number, part in enumerate(parts) if part not in known]
    for number, part in enumerate(parts):
        if saved is not None and part in known:
            counts[number] = dict(zip(saved.shapes, saved.counts[known[part]].tolist(), strict=True))

    def shapes_of(number: int) -> dict[Shape, int]:
        start, end, _ = parts[number]
        header = header_of(part_name(start, end))
        check_part(header, part_identity(schema, start))
        return header.shapes()

    with ThreadPoolExecutor(_READERS, "index") as threads:
        for number, found in zip(new, threads.map(shapes_of, new), strict=True):
            counts[number] = found
    shapes = tuple(sorted({shape for each in counts for shape, count in each.items() if count}))
    table = np.array([[each.get(shape, 0) for shape in shapes] for each in counts], np.int64)
    index = Index(shapes, wanted, table.reshape(len(parts), len(shapes)))
    with contextlib.suppress(UserError):  # a store that cannot be written is read all the same
        write_index(root / FILE, index, identity)
    return index


def write_index(path: Path, index: Index, identity: str) -> None:
    """Commit the index to `path`. Raises UserError where it cannot be written."""
    parts, counts = torch.from_numpy(index.parts), torch.from_numpy(index.counts)
    digest = torch.tensor([chained_digest([bytes_of(parts), bytes_of(counts)])])
    shapes = ",".join(shape_name(shape) for shape in index.shapes)
    tensors = {"digest": digest, "part": parts, "count": counts}
    commit_tensors(path, tensors, {"shapes": shapes, "store": identity})


def listed(index: Index, number: int) -> dict[Shape, int]:
    """The samples of each shape that the index has for a part."""
    return {shape: int(count) for shape, count in zip(index.shapes, index.counts[number], strict=True) if count}


def misfit(path: Path, counts: dict[Shape, int], rows: dict[Shape, int]) -> str | None:
    """What is wrong where the part at `path` has not the rows of each shape that the index has for it."""
    if counts == {shape: count for shape, count in rows.items() if count}:
        return None
    return f"data.features: {path} has other rows than {path.parent / FILE} says; delete that index: it is made again"


def read_index(path: Path, identity: str) -> Index | None:
    """The index in a file; None where there is none, or none of this store that is whole."""
    if not path.exists():
        return None
    try:
        header = read_header(path)
        parts, counts = read_column(header, "part"), read_column(header, "count")
        names = header.metadata["shapes"].split(",") if header.metadata["shapes"] else []
        shapes = tuple(parse_shape(name) for name in names)
        if int(read_column(header, "digest")) != chained_digest([bytes_of(parts), bytes_of(counts)]):
            raise damaged(path, "is damaged")
        typed = parts.dtype == counts.dtype == torch.int64 and parts.shape[1:] == (3,)
        if header.metadata["store"] != identity or not typed or counts.shape != (len(parts), len(shapes)):
            return None
        if (counts < 0).any():
            raise damaged(path, "is damaged")
    except (UserError, KeyError, ValueError, RuntimeError):
        return None
    return Index(shapes, parts.numpy(), counts.numpy())
