"""Several clips of each video of a source, one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS
from bigdit.sources.protocol import Contents, Entry, Item, Readable, Source, Unusable
from bigdit.sources.videos.resample import Clip


@dataclass(frozen=True)
class ClipItem(Readable):
    """Clip `number` of an item, which has been told where it begins."""

    index: int
    name: str
    item: Item
    number: int

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        contents = self.item.read(max_pixels)
        return dataclasses.replace(contents, decode=lambda: self._clip(contents.decode())) if self.number else contents

    def _clip(self, found: Image.Image | Iterator[Image.Image]) -> Iterator[Image.Image]:
        if isinstance(found, Image.Image):
            raise Unusable("a picture, which has one clip")
        return _at_least_one(found)


class Clips:
    """So many clips of each item of a source, those of one beside each other. How many a video has is known when it is
    decoded: loading one that it has not raises Unusable."""

    def __init__(self, source: Source, count: int, clip: Clip) -> None:
        self._source, self._count, self._clip = source, count, clip
        self.class_names = source.class_names
        inner = source.identity
        digest = xxhash.xxh3_128_hexdigest(f"{inner['digest']} in {count} clips".encode())
        self.identity: dict[str, Any] = {**inner, "count": len(self), "digest": digest}

    def __len__(self) -> int:
        return len(self._source) * self._count

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return (dataclasses.replace(each, count=each.count * self._count) for each in self._source.entries())

    def items(self, start: int, end: int) -> list[ClipItem]:
        """Clips [start, end)."""
        first, end = start // self._count, min(end, len(self))
        inner = self._source.items(first, -(-end // self._count))
        return [self._item(index, inner[index // self._count - first]) for index in range(start, end)]

    def _item(self, index: int, item: Item) -> ClipItem:
        number = index % self._count
        clip = dataclasses.replace(self._clip, start=number * self._clip.frames)
        begun = dataclasses.replace(cast(Any, item), clip=clip)  # the items of all kinds have one
        return ClipItem(index, f"{item.name} from {float(clip.start * clip.step):g} s", begun, number)


def _at_least_one(frames: Iterator[Image.Image]) -> Iterator[Image.Image]:
    first = next(frames, None)
    if first is None:
        raise Unusable("the video ends before this clip")
    yield first
    yield from frames
