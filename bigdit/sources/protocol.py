"""What a source of pictures and captions or labels is to others: a count, an identity, items that load themselves."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS


class Unusable(Exception):
    """A picture or a caption that cannot be trained on: it is skipped, and its reason reported."""


@dataclass(frozen=True)
class Caption:
    """One description of a picture; one of several is drawn with a probability in proportion to its `weight` > 0."""

    text: str
    weight: float = 1.0


@dataclass(frozen=True)
class Sample:
    """A decoded picture, upright, opaque, of mode RGB or L, or the frames of a video, which are decoded as they are
    taken; and its captions, at least one; or of a source with labels none, and the name or the number of its class."""

    image: Image.Image | Iterator[Image.Image]
    captions: tuple[Caption, ...] = ()
    label: str | int | None = None


@dataclass(frozen=True)
class Contents:
    """What was read of an item: how its picture is decoded, and the digest of the bytes that are; captions or label."""

    decode: Callable[[], Image.Image | Iterator[Image.Image]]
    digest: Callable[[], int]
    captions: tuple[Caption, ...] = ()
    label: str | int | None = None

    def sample(self) -> Sample:
        """Decoded. Raises Unusable for a damaged picture."""
        return Sample(self.decode(), self.captions, self.label)

    def digests(self) -> tuple[int, int]:
        """xxh3-64 of the picture as it lies on the disk, and of its captions or its label."""
        said = [[each.text, each.weight] for each in self.captions] or self.label
        return self.digest(), xxhash.xxh3_64_intdigest(json.dumps(said).encode())


class Readable(ABC):
    """An item by what it reads."""

    @abstractmethod
    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""

    def load(self, max_pixels: int = MAX_PIXELS) -> Sample:
        """As Item.load."""
        return self.read(max_pixels).sample()


@dataclass(frozen=True)
class Entry:
    """A file of a source, or a picture with its captions: how many items it has, what tells those of a `picture` and of
    `captions` without reading them, such as sizes; and when they were changed last."""

    name: str
    count: int
    picture: str
    captions: str
    times: str


class Item(Protocol):
    """One picture of a source: its `index` there, its `name` for people. Items can be sent to other processes:
    they hold paths and offsets, and no open files."""

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """Read all but videos. Raises as `load`."""
        ...

    def load(self, max_pixels: int = MAX_PIXELS) -> Sample:
        """Read and decode; frames of a video may raise as well. A picture or a frame has at most `max_pixels`.

        Raises Unusable for a damaged picture and for captions or labels that are missing, empty or malformed; UserError
        where files cannot be read at all, since then the disk and not the data is at fault.
        """
        ...


class Source(Protocol):
    """Pictures in a fixed order. `class_names`: of the classes that it knows by itself."""

    @property
    def class_names(self) -> Collection[str]: ...

    @property
    def identity(self) -> dict[str, Any]:
        """`kind`, `count` and `digest`: equal where the items and their order are; free of paths and times, so
        that a copied source stays the same one. What `open_source` returns has `sources` as well, the identity
        of each source of the list in its order."""
        ...

    def __len__(self) -> int: ...

    def entries(self) -> Iterator[Entry]:
        """What it consists of, in its order; without `times` it tells what `identity` does."""
        ...

    def items(self, start: int, end: int) -> Sequence[Item]:
        """Items [start, end) of the order; pictures are not touched before their `load`."""
        ...
