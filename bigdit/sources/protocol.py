"""What a source of pictures and captions or labels is to others: a count, an identity, items that load themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Item(Protocol):
    """One picture of a source: its `index` there, its `name` for people. Items can be sent to other processes:
    they hold paths and offsets, and no open files."""

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...

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

    def items(self, start: int, end: int) -> Sequence[Item]:
        """Items [start, end) of the order; pictures are not touched before their `load`."""
        ...
