"""Where pictures and captions come from: a folder of pictures, with a `.txt` caption beside each."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from bigdit.errors import UserError
from bigdit.features.digest import lines_digest

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


class Unusable(Exception):
    """A picture or a caption that cannot be trained on: it is skipped, and its reason reported."""


@dataclass(frozen=True)
class Item:
    """One picture of a source: its `index` there, its `name` for people, its two files."""

    index: int
    name: str
    picture: Path
    caption: Path

    def load(self) -> tuple[Image.Image, str]:
        """The decoded picture and its caption.

        Raises Unusable for a damaged picture and for a caption that is missing, empty or not UTF-8; UserError
        where the picture cannot be read at all, since then the disk and not the data is at fault.
        """
        try:
            data = self.picture.read_bytes()
        except OSError as error:
            raise UserError(
                f"data.images: {self.picture} cannot be read: {error.strerror}; run again to go on"
            ) from None
        caption = self._read_caption()
        try:
            image = Image.open(io.BytesIO(data))
            image.load()
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise many classes on damaged files
            raise Unusable(f"damaged picture: {type(error).__name__}: {error}") from None
        return image, caption

    def _read_caption(self) -> str:
        try:
            caption = self.caption.read_bytes().decode("utf-8").strip()
        except FileNotFoundError:
            raise Unusable(f"caption {self.caption.name} is missing") from None
        except OSError as error:
            raise UserError(
                f"data.images: {self.caption} cannot be read: {error.strerror}; run again to go on"
            ) from None
        except UnicodeDecodeError:
            raise Unusable(f"caption {self.caption.name} is not UTF-8") from None
        if not caption:
            raise Unusable(f"caption {self.caption.name} is empty")
        return caption


class ImageFolder:
    """All pictures below `root`, in the order of their relative paths."""

    def __init__(self, root: Path) -> None:
        """List the folder. Raises UserError where it is missing or holds no pictures."""
        if not root.is_dir():
            raise UserError(f"data.images: the folder {root} does not exist")
        self.root = root
        sizes = dict(_files(root))
        self._names = sorted(name for name in sizes if name.lower().endswith(SUFFIXES))
        if not self._names:
            raise UserError(f"data.images: {root} holds no pictures ({', '.join(SUFFIXES)})")
        # A caption that was edited changes the features as much as a picture.
        lines = (f"{name}\0{sizes[name]}\0{sizes.get(_caption_of(name), -1)}" for name in self._names)
        digest = lines_digest(os.fsencode(line) for line in lines)
        self.identity = {"kind": "folder", "count": len(self._names), "digest": digest}

    def __len__(self) -> int:
        return len(self._names)

    def items(self, start: int, end: int) -> list[Item]:
        """Pictures [start, end) of the order."""
        return [
            Item(index, name, self.root / name, self.root / _caption_of(name))
            for index, name in enumerate(self._names[start:end], start)
        ]


def _caption_of(name: str) -> str:
    return os.path.splitext(name)[0] + ".txt"


def _files(root: Path) -> Iterator[tuple[str, int]]:
    """Relative path and size of each file below `root`."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.is_file():
                    yield name, entry.stat().st_size
