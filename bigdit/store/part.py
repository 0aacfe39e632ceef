"""One part of a store: the features of one range of the source, in one safetensors file.

A part's name is its record of completion. In the order of the file, with shapes as in `latent/4x64x64`:

    digests      int64 [3]: xxh3 of the header, of the tables below, and of `captions`
    content      int64 [range, 2]: xxh3 of each picture and of its captions or label, as the source had them; 0 of those
                 that could not be read
    caption      int64 [m, 4]: text start, text length, weight (the bits of an fp32), xxh3 of (states, scale, pooled)
    row/SHAPE    int64 [n, 4]: source index, first caption, captions, xxh3 of the latents, seeded with the index
    label/SHAPE  int64 [n]: the class, where pictures have classes, and then no captions
    frame/SHAPE  int64 [n]: xxh3 of the two of the row that are called so below, seeded with the index
    latent/SHAPE [n, C, H, W] or [n, C, F, H, W], bf16 (fp32 of the identity codec); [n, 2, …] of mean and deviation
    first_frame/SHAPE   bf16 [n, C, F, H, W]: latents of the first frame, followed by zeros, of models that begin so
    image_embeds/SHAPE  bf16 [n, tokens, dim]: what an image encoder sees in it, where they are fed that
    text         [tokens, dim] bf16, or float8_e4m3fn with `text_scale` fp32 [tokens]; a caption's text stands once
    pooled       bf16 [m, p], where the encoders give a vector
    captions     uint8: JSON of source index to [[text, weight], …]

Of captions that several encoders read, or whose mask does not show all states, `caption` is [m, 5], the fifth how many
it shows, the digest is of the streams too, and for each of these there are

    stream/NAME  int64 [m, 3]: start, length, how many states the mask shows
    text/NAME    as `text`, with `text_scale/NAME`

Tables (`content`, `caption`, `stream/…`, `row/…`, `label/…`, `frame/…`) come first: one small read opens a part. Every
byte is under a digest. The metadata names the format, the range, the identity of encoders, buckets and pictures, what
was skipped, and which captions were cut. The range is the name's, or the part lies in the place of another.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np
import torch

from bigdit.store.tensors import Pieces, bytes_of, chained_digest, commit, header_bytes, row_digest
from bigdit.store.text import Caption, Cut, Text, caption_columns, is_streamed

FORMAT = "3"
LABELLED = "4"
"""The format of parts with labels: what reads the one before knows no such tables."""
STREAMED = "5"
"""That of parts with streams, or with masks of their own."""

FRAMED = "6"
"""That of parts with first frames."""
FIRST_FRAME = "first_frame"
FRAME_COLUMNS = (FIRST_FRAME, "image_embeds")
"""What is kept of first frames, in the order of their digest."""

Shape = tuple[int, int, int] | tuple[int, int, int, int]
"""Of a sample's latents: C×H×W, or C×F×H×W of videos."""


@dataclass(frozen=True)
class Skipped:
    """A picture of the source that has no features, and why."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Encoded:
    """The features of one range: latents [n, *shape], or [n, 2, *shape] of mean and deviation, and source indices of
    each shape; each index' captions; the text of each distinct caption; where pictures have classes, each index'; of
    models that begin with a picture, what is kept of first frames by shape and name of FRAME_COLUMNS, [n, …]; the
    captions that tokenizers cut; and `contents`, the digests of the picture and of the captions or the label of each
    index that could be read."""

    latents: Mapping[Shape, torch.Tensor]
    indices: Mapping[Shape, list[int]]
    captions: Mapping[int, tuple[Caption, ...]]
    texts: Mapping[str, Text]
    skipped: list[Skipped]
    labels: Mapping[int, int] | None = None
    frames: Mapping[Shape, Mapping[str, torch.Tensor]] | None = None
    cuts: Sequence[Cut] = ()
    contents: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def part_path(root: Path, start: int, end: int) -> Path:
    """The file of the source range [start, end)."""
    return root / part_name(start, end)


def part_name(start: int, end: int) -> str:
    """The name of that file."""
    return f"part-{start:012d}-{end:012d}.safetensors"


def part_range(name: str) -> tuple[int, int] | None:
    """The source range [start, end) of a file's name; None where it is not that of a part."""
    found = re.fullmatch(r"part-(\d{12})-(\d{12})\.safetensors", name)
    return None if found is None else (int(found[1]), int(found[2]))


def range_text(name: str) -> str:
    """The range of a file's name as its metadata has it, `256-512`; `0-0` where the name is not that of a part."""
    start, end = part_range(name) or (0, 0)
    return f"{start}-{end}"


def parse_shape(name: str) -> Shape:
    """The shape that `shape_name` wrote. Raises ValueError where it wrote none of this kind."""
    sides = tuple(int(side) for side in name.split("x"))
    if len(sides) not in (3, 4):
        raise ValueError(f"{name} is no shape of latents")
    return cast(Shape, sides)


def shape_name(shape: Shape) -> str:
    """C×H×W as it stands in tensor names and reports: `4x64x64`."""
    return "x".join(str(side) for side in shape)


def write_part(
    path: Path, encoded: Encoded, scratch: Path | None = None, *, identity: str, eight_bits: bool = False
) -> None:
    """Write and commit a part, by way of `scratch` as in files.replacing; the same features give the same bytes.

    `identity`: its `schema.part_identity`; with `eight_bits` the texts' states are stored in 8 bits.
    Raises UserError where the disk is full or cannot be written.
    """
    tensors: dict[str, Pieces] = {"digests": Pieces.of(torch.zeros(3, dtype=torch.int64))}
    contents = [encoded.contents.get(index, (0, 0)) for index in range(*(part_range(path.name) or (0, 0)))]
    tensors["content"] = Pieces.of(torch.from_numpy(np.array(contents, np.uint64).view(np.int64).reshape(-1, 2)))
    tables, columns, firsts = caption_columns(encoded.captions, encoded.texts, eight_bits)
    tensors |= tables
    for shape, indices in encoded.indices.items():
        latents = encoded.latents[shape]
        rows = [
            (index, firsts.get(index, 0), len(encoded.captions.get(index, ())), row_digest(index, bytes_of(sample)))
            for index, sample in zip(indices, latents, strict=True)
        ]
        tensors[f"row/{shape_name(shape)}"] = Pieces.of(torch.tensor(rows, dtype=torch.int64).view(-1, 4))
    if encoded.labels is not None:
        for shape, indices in encoded.indices.items():
            labels = [encoded.labels[index] for index in indices]
            tensors[f"label/{shape_name(shape)}"] = Pieces.of(torch.tensor(labels, dtype=torch.int64))
    framed = encoded.frames or {}
    for shape, kept in framed.items():
        rows_of = zip(encoded.indices[shape], *(kept[name] for name in FRAME_COLUMNS if name in kept), strict=True)
        digests = [chained_digest(map(bytes_of, row), index) for index, *row in rows_of]
        tensors[f"frame/{shape_name(shape)}"] = Pieces.of(torch.tensor(digests, dtype=torch.int64))
    for shape in encoded.indices:
        tensors[f"latent/{shape_name(shape)}"] = Pieces.of(encoded.latents[shape])
    for shape, kept in framed.items():
        tensors |= {f"{name}/{shape_name(shape)}": Pieces.of(each) for name, each in kept.items()}
    tensors |= columns
    captions = json.dumps(
        {str(index): [[each.text, each.weight] for each in found] for index, found in encoded.captions.items()}
    )
    tensors["captions"] = Pieces.of(torch.from_numpy(np.frombuffer(captions.encode(), np.uint8).copy()))
    skipped = json.dumps([[item.index, item.name, item.reason] for item in encoded.skipped])
    metadata = {"format": _format(encoded), "range": range_text(path.name), "store": identity, "skipped": skipped}
    metadata["cut"] = json.dumps([asdict(cut) for cut in encoded.cuts])
    header = header_bytes(tensors, metadata)
    tensors["digests"].pieces[0].copy_(torch.tensor(_digests(header, tensors)))
    commit(path, header, tensors, scratch)


def _format(encoded: Encoded) -> str:
    """The oldest format that has all of it: parts are the same to the byte as those before a later one was made."""
    if encoded.frames is not None:
        return FRAMED
    if encoded.labels is not None:
        return LABELLED
    return STREAMED if is_streamed(encoded.texts) else FORMAT


def _digests(header: bytes, tensors: Mapping[str, Pieces]) -> list[int]:
    """Of the header, the tables and the captions."""
    kinds = ("row/", "label/", "stream/", "frame/")
    tables = ["content", "caption", *(name for kind in kinds for name in sorted(tensors) if name.startswith(kind))]
    return [
        chained_digest([header]),
        chained_digest(buffer for name in tables for buffer in tensors[name].buffers()),
        chained_digest(tensors["captions"].buffers()),
    ]


WAITING_PARTS = 2
"""Parts in memory besides the one that is encoded: one that is being written, and one that the disk is late for."""


class PartWriter:
    """Commits parts in the order in which they are given; the `with` block ends well only when all are on disk.

    `write` returns at once, unless WAITING_PARTS wait already. An error of the disk comes out of the next `write` or
    of the block's end, and what was given after it is not written. On any other error of the block, what waits is
    written all the same: it is whole.
    """

    def __init__(self, *, eight_bits: bool = False) -> None:
        self._eight_bits = eight_bits
        self._thread = ThreadPoolExecutor(1, "writer")
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def write(
        self,
        path: Path,
        encoded: Encoded,
        identity: str,
        scratch: Path | None = None,
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a part of this `part_identity`, by way of `scratch` as in files.replacing; `committed` is called, in
        the writer's thread, when it is on disk. Raises UserError where an earlier one could not be written."""
        self._take_up(WAITING_PARTS - 1)
        self._waiting.append(self._thread.submit(self._commit, path, encoded, identity, scratch, committed))

    def _commit(
        self, path: Path, encoded: Encoded, identity: str, scratch: Path | None, committed: Callable[[], None]
    ) -> None:
        if self._failed:
            return
        try:
            write_part(path, encoded, scratch, identity=identity, eight_bits=self._eight_bits)
            committed()
        except BaseException:
            self._failed = True
            raise

    def _take_up(self, most: int) -> None:
        """Wait until `most` parts wait, and raise what went wrong with one."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0].done()):
            self._waiting.popleft().result()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self._take_up(0)
