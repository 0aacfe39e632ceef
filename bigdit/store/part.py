"""One part of a store: the features of one range of the source, in one safetensors file.

A file with the name of a part is complete. These are its tensors in order. SHAPE is as in `latent/4x64x64`, or as in
`latent/4x64x64r1` for rows with one reference where others have more:

    digests      int64 [3]: xxh3 of the header, of the tables below, and of `captions`
    content      int64 [range, 2]: xxh3 of each image, and of its captions or label, in the source; 0 if unreadable
    caption      int64 [m, 5]: text start, text length, weight (the bits of an fp32), xxh3 of all sequences (states,
                 scale) and pooled, states that the mask shows
    row/SHAPE    int64 [n, 4]: source index, first caption, captions, xxh3 of the latents, seeded with the index
    label/SHAPE  int64 [n]: the class, if images have classes instead of captions
    stream/NAME  int64 [m, 3]: start, length, states that the mask shows, for the sequence of a further text encoder
    frame/SHAPE  int64 [n]: xxh3 of the row's columns from first_frame to fill, in this order, seeded with the index
    latent/SHAPE [n, C, H, W] or [n, C, F, H, W], bf16 (fp32 of the identity codec); [n, 2, …] of mean and deviation
    first_frame/SHAPE   bf16 [n, C, F, H, W]: latents of the first frame, followed by zeros, for image-to-video models
    image_embeds/SHAPE  bf16 [n, tokens, dim]: embeddings of the first frame by an image encoder, for some of them
    loss_mask/SHAPE     bf16 [n, H, W]: the weight of the loss at each latent, if images of the part have masks
    reference/SHAPE     bf16 [n, references, C, h, w]: latents of the images before the edit, for edit models
    fill/SHAPE          bf16 [n, C + pixels a latent, H, W]: latents of the masked image, and its mask, for fill models
    text, text/NAME     [tokens, dim] bf16, or float8_e4m3fn with `text_scale…` fp32 [tokens]; each caption once
    pooled       bf16 [m, p], if the encoders give a vector
    captions     uint8: JSON of source index to [[text, weight], …]

Tables (`content`, `caption`, `row/…`, `label/…`, `stream/…`, `frame/…`) come first, so one small read opens a part.
Digests cover every byte. The metadata has the range, the identity of encoders, buckets and images, the skipped images,
the cut captions, and the lengths of all captions. The range must be the one in the file's name.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np
import torch

from bigdit.catalog.families import FILL, LOSS_MASK, REFERENCE
from bigdit.sources.protocol import Caption
from bigdit.store.tensors import Pieces, bytes_of, chained_digest, commit, header_bytes, row_digest
from bigdit.store.text import Cut, Lengths, Text, TextKey, caption_columns

FIRST_FRAME = "first_frame"
FRAME_COLUMNS = (FIRST_FRAME, "image_embeds", LOSS_MASK, REFERENCE, FILL)
"""The columns of first frames, masks, references and masked images, in the order of their digest."""

Shape = tuple[int, int, int] | tuple[int, int, int, int]
"""The shape of a sample's latents: C×H×W, or C×F×H×W of videos."""


class EditShape(tuple[int, int, int]):
    """The shape C×H×W of edits with fewer `references` than the most of their store. They have their own bucket."""

    references: int

    def __new__(cls, shape: Sequence[int], references: int) -> EditShape:
        made = super().__new__(cls, shape)
        made.references = references
        return made

    def __getnewargs__(self) -> tuple[tuple[int, ...], int]:
        return tuple(self), self.references

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EditShape) and super().__eq__(other) and self.references == other.references

    def __hash__(self) -> int:
        return hash((*self, self.references))


@dataclass(frozen=True)
class Skipped:
    """An image of the source without features, and why."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class EncodedRange:
    """The features of one range.

    By shape: latents [n, *shape], or [n, 2, *shape] of mean and deviation; source indices; first frames or references
    [n, …] by the names of FRAME_COLUMNS. By index: captions; labels, if images have classes; `contents`, the digests of
    the image and of its captions or label. `texts`: the text of each distinct caption, or of each caption of each
    image. `cuts` and `lengths`: which captions tokenizers cut, and how long all are.
    """

    latents: Mapping[Shape, torch.Tensor]
    indices: Mapping[Shape, list[int]]
    captions: Mapping[int, tuple[Caption, ...]]
    texts: Mapping[TextKey, Text]
    skipped: list[Skipped]
    labels: Mapping[int, int] | None = None
    frames: Mapping[Shape, Mapping[str, torch.Tensor]] | None = None
    cuts: Sequence[Cut] = ()
    contents: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    lengths: Sequence[Lengths] = ()


def part_path(root: Path, start: int, end: int) -> Path:
    """The file of the source range [start, end)."""
    return root / part_name(start, end)


def part_name(start: int, end: int) -> str:
    """The file name of a range."""
    return f"part-{start:012d}-{end:012d}.safetensors"


def part_range(name: str) -> tuple[int, int] | None:
    """The source range [start, end) of a file's name; None if it is not a part's name."""
    found = re.fullmatch(r"part-(\d{12})-(\d{12})\.safetensors", name)
    return None if found is None else (int(found[1]), int(found[2]))


def range_text(name: str) -> str:
    """The range in a file's name as the metadata has it, `256-512`; `0-0` if it is not a part's name."""
    start, end = part_range(name) or (0, 0)
    return f"{start}-{end}"


_EDITS = "r"


def parse_shape(name: str) -> Shape:
    """The inverse of `shape_name`. Raises ValueError for other texts."""
    sizes, _, references = name.partition(_EDITS)
    sides = tuple(int(side) for side in sizes.split("x"))
    if references:
        return EditShape(sides, int(references))
    if len(sides) not in (3, 4):
        raise ValueError(f"{name} is not a shape of latents")
    return cast(Shape, sides)


def shape_name(shape: Shape) -> str:
    """A shape in names of tensors and in reports: `4x64x64`; `4x64x64r1` for rows with one reference among more."""
    edits = f"{_EDITS}{shape.references}" if isinstance(shape, EditShape) else ""
    return "x".join(str(side) for side in shape) + edits


def write_part(
    path: Path, encoded: EncodedRange, workspace: Path | None = None, *, identity: str, eight_bits: bool = False
) -> None:
    """Write and commit a part, through `workspace` as in files.replacing. The same features give the same bytes.

    `identity`: its `schema.part_identity`. With `eight_bits`, states of texts are stored in 8 bits.
    Raises UserError if the disk is full or cannot be written.
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
    for shape, frames in framed.items():
        rows_of = zip(encoded.indices[shape], *(frames[name] for name in FRAME_COLUMNS if name in frames), strict=True)
        digests = [chained_digest(map(bytes_of, row), index) for index, *row in rows_of]
        tensors[f"frame/{shape_name(shape)}"] = Pieces.of(torch.tensor(digests, dtype=torch.int64))
    for shape in encoded.indices:
        tensors[f"latent/{shape_name(shape)}"] = Pieces.of(encoded.latents[shape])
    for shape, frames in framed.items():
        tensors |= {f"{name}/{shape_name(shape)}": Pieces.of(each) for name, each in frames.items()}
    tensors |= columns
    captions = json.dumps(
        {str(index): [[each.text, each.weight] for each in found] for index, found in encoded.captions.items()}
    )
    tensors["captions"] = Pieces.of(torch.from_numpy(np.frombuffer(captions.encode(), np.uint8).copy()))
    skipped = json.dumps([[item.index, item.name, item.reason] for item in encoded.skipped])
    cut = json.dumps([asdict(cut) for cut in encoded.cuts])
    metadata = {"range": range_text(path.name), "store": identity, "skipped": skipped, "cut": cut}
    if encoded.lengths:
        metadata["lengths"] = json.dumps([asdict(each) for each in encoded.lengths])
    header = header_bytes(tensors, metadata)
    tensors["digests"].pieces[0].copy_(torch.tensor(_digests(header, tensors)))
    commit(path, header, tensors, workspace)


def _digests(header: bytes, tensors: Mapping[str, Pieces]) -> list[int]:
    """The digests of the header, the tables and the captions."""
    kinds = ("row/", "label/", "stream/", "frame/")
    tables = ["content", "caption", *(name for kind in kinds for name in sorted(tensors) if name.startswith(kind))]
    return [
        chained_digest([header]),
        chained_digest(buffer for name in tables for buffer in tensors[name].buffers()),
        chained_digest(tensors["captions"].buffers()),
    ]


WAITING_PARTS = 2
"""Parts in memory besides the one that is encoded: one is being written, and one waits for the disk."""


class PartWriter:
    """Commits parts in order, in a thread. The `with` block ends without error only when all are on disk.

    `write` returns at once, unless WAITING_PARTS already wait. After an error of the disk, the next `write` or the end
    of the block raises it, and later parts are not written. After any other error in the block, waiting parts are still
    written.
    """

    def __init__(self, *, eight_bits: bool = False) -> None:
        self._eight_bits = eight_bits
        self._thread = ThreadPoolExecutor(1, "writer")
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def write(
        self,
        path: Path,
        encoded: EncodedRange,
        identity: str,
        workspace: Path | None = None,
        committed: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """Write a part with this `part_identity`, through `workspace` as in files.replacing.

        The writer's thread calls `committed` with its seconds when the part is on disk. Raises UserError if an earlier
        part failed.
        """
        self._wait(WAITING_PARTS - 1)
        self._waiting.append(self._thread.submit(self._commit, path, encoded, identity, workspace, committed))

    def _commit(
        self,
        path: Path,
        encoded: EncodedRange,
        identity: str,
        workspace: Path | None,
        committed: Callable[[float], object],
    ) -> None:
        if self._failed:
            return
        began = time.perf_counter()
        try:
            write_part(path, encoded, workspace, identity=identity, eight_bits=self._eight_bits)
            committed(time.perf_counter() - began)
        except BaseException:
            self._failed = True
            raise

    def _wait(self, most: int) -> None:
        """Block until at most `most` parts wait. Raises the error of a part."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0].done()):
            self._waiting.popleft().result()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self._wait(0)
