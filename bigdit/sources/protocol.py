"""The interface of a source of images with captions or labels: a count, an identity, and items that load themselves."""

from __future__ import annotations

import bisect
import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS


class Unusable(Exception):
    """An image or a caption that cannot be used. It is skipped, and the reason is reported."""


@dataclass(frozen=True)
class Caption:
    """One caption of an image. Of several, one is chosen with probability proportional to its `weight` > 0."""

    text: str
    weight: float = 1.0


@dataclass(frozen=True)
class Fit:
    """How an image is fitted to a bucket. `crop_at`: 0 keeps its left or top, 1 its right or bottom, 0.5 its centre.

    `min_side` and `max_upscale`: see DataConfig. `buckets`: those of its source. Without any, the run's are used.
    """

    crop_at: float = 0.5
    min_side: int = 1
    max_upscale: float | None = None
    buckets: tuple[tuple[int, ...], ...] = ()


CENTRED = Fit()


@dataclass(frozen=True)
class Sample:
    """A decoded image (upright, opaque, mode RGB or L) or the frames of a video, which are decoded lazily.

    It has at least one caption, or a label: the name or number of its class. `mask` (mode L): the weight of the loss at
    each pixel, or what fill models paint. `references`: the images before the edit.
    """

    image: Image.Image | Iterator[Image.Image]
    captions: tuple[Caption, ...] = ()
    label: str | int | None = None
    fit: Fit = CENTRED
    mask: Image.Image | None = None
    references: tuple[Image.Image, ...] = ()


@dataclass(frozen=True)
class Contents:
    """An item after its files were read. Its images are decoded and digested by functions. The digest covers mask and
    references too."""

    decode: Callable[[], Image.Image | Iterator[Image.Image]]
    digest: Callable[[], int]
    captions: tuple[Caption, ...] = ()
    label: str | int | None = None
    fit: Fit = CENTRED
    mask: Callable[[], Image.Image | None] | None = None
    references: tuple[Callable[[], Image.Image], ...] = ()

    def sample(self) -> Sample:
        """Decode the images and the mask. Raises Unusable for damaged ones, and a mask of another size or all black."""
        image, mask = self.decode(), None if self.mask is None else self.mask()
        if mask is not None and isinstance(image, Image.Image) and mask.size != image.size:
            sizes = [f"{each.width} × {each.height} pixels" for each in (mask, image)]
            raise Unusable(f"mask of {sizes[0]} for an image of {sizes[1]}")
        if mask is not None and mask.getbbox() is None:
            raise Unusable("mask is black everywhere: nothing of the image would be trained")
        references = tuple(decode() for decode in self.references)
        return Sample(image, self.captions, self.label, self.fit, mask, references)

    def digests(self) -> tuple[int, int]:
        """xxh3-64 of the files of its images, and of its captions or label."""
        text = [[each.text, each.weight] for each in self.captions] or self.label
        return self.digest(), xxhash.xxh3_64_intdigest(json.dumps(text).encode())


@dataclass(frozen=True)
class Entry:
    """A file of a source, or an image with its captions, and its number of items.

    `image` and `captions` describe the contents without reading them, for example by sizes. `times`: last changes.
    """

    name: str
    count: int
    image: str
    captions: str
    times: str


class Item(ABC):
    """One image of a source: its `index` there, and its `name` for people.

    Items can be sent to other processes: they hold paths and offsets, and no open files.
    """

    index: int
    name: str

    @abstractmethod
    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """Read all files but videos. Raises as `load`, and Unusable for an image or a frame above `max_pixels`."""

    def load(self) -> Sample:
        """Read and decode. Frames of a video may raise later.

        Raises Unusable for a damaged image, and for captions or labels that are missing, empty or malformed. Raises
        UserError if a file cannot be read at all, since then the disk is at fault.
        """
        return self.read().sample()

    def captions(self) -> tuple[Caption, ...]:
        """Its captions, if possible without reading images. Raises as `load`."""
        return self.read().captions


class Source(Protocol):
    """Images in a fixed order. `class_names`: the names of the classes in the source."""

    @property
    def class_names(self) -> Collection[str]: ...

    @property
    def identity(self) -> dict[str, Any]:
        """`kind`, `count` and `digest`. Two sources have the same ones if they have the same items in the same order.

        They hold no paths and times, so a copied source has the same identity. The identity of a SourceList also has
        `sources`, the identity of each.
        """
        ...

    def __len__(self) -> int: ...

    def entries(self) -> Iterator[Entry]:
        """The entries, in order. Without `times` they hold what `identity` digests."""
        ...

    def items(self, start: int, end: int) -> Sequence[Item]:
        """Items [start, end). No image is read before `load`."""
        ...


def cut(ends: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut [start, end) where joined sequences end: their number, first index, and the range within each."""
    for number in range(bisect.bisect_right(ends, start), len(ends)):
        first = ends[number - 1] if number else 0
        begin, stop = max(start - first, 0), min(end, ends[number]) - first
        if begin < stop:
            yield number, first, begin, stop


def _unread() -> NoReturn:
    raise AssertionError("an item without its images is neither decoded nor digested")


@dataclass(frozen=True)
class DerivedItem(Item):
    """An item whose contents are changed after they are read."""

    index: int
    name: str
    item: Item
    change: Callable[[Contents], Contents]

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        return self.change(self.item.read(max_pixels))

    def captions(self) -> tuple[Caption, ...]:
        """As Item.captions."""
        return self.change(Contents(_unread, _unread, self.item.captions())).captions


class Several(ABC):
    """`count` items derived from each item of a source, one after another. `how` describes them in the digest."""

    def __init__(self, source: Source, count: int, how: str) -> None:
        self._source, self._count, self.class_names = source, count, source.class_names
        inner = source.identity
        digest = xxhash.xxh3_128_hexdigest(f"{inner['digest']} {how}".encode())
        self.identity: dict[str, Any] = {**inner, "count": len(self), "digest": digest}

    def __len__(self) -> int:
        return len(self._source) * self._count

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return (dataclasses.replace(each, count=each.count * self._count) for each in self._source.entries())

    def items(self, start: int, end: int) -> list[Item]:
        """As Source.items."""
        first, end = start // self._count, min(end, len(self))
        inner = self._source.items(first, -(-end // self._count))
        return [self._item(index, inner[index // self._count - first]) for index in range(start, end)]

    @abstractmethod
    def _item(self, index: int, item: Item) -> Item:
        """The item `index`, derived from `item`."""
