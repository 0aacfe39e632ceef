"""Folders of images and videos."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import xxhash
from PIL import Image

from bigdit import log
from bigdit.config.data import MAX_PIXELS, SourceConfig
from bigdit.errors import UserError, shown
from bigdit.sources.captions import (
    LISTS,
    CaptionFiles,
    Missing,
    captions_of,
    check_link,
    conversion,
    counted,
    folder_label,
    log_ignored,
    read_linked,
    reads_captions,
    usual_files,
)
from bigdit.sources.disk import (
    IMAGE_BYTES,
    empty_folder_above,
    not_mounted,
    not_there,
    read_file,
    sampled_digest,
    unreadable,
)
from bigdit.sources.image import (
    MASK,
    SUFFIXES,
    alpha,
    decode_part,
    usual_mark,
    with_references,
)
from bigdit.sources.listing import Listing, kind_of_mask
from bigdit.sources.protocol import Caption, Contents, Entry, Item, Unusable
from bigdit.sources.videos import SUFFIXES as VIDEOS
from bigdit.sources.videos import Clip, contents_of, is_video, video_frames
from bigdit.units import how_many

BLOCK = 1024
_NAMED = 3  # the files that a message names


class Names:
    """File names in order, compressed: 2 bytes for a numbered name, 21 for 32 random characters."""

    def __init__(self, names: Iterable[str]) -> None:
        self._blocks: list[bytes] = []
        self._count = 0
        names = iter(names)
        while block := list(itertools.islice(names, BLOCK)):
            self._count += len(block)
            # No file name holds a zero byte.
            self._blocks.append(zlib.compress(b"\0".join(map(os.fsencode, block)), level=1))

    def __len__(self) -> int:
        return self._count

    def range(self, start: int, end: int) -> Iterator[str]:
        """Names [start, end)."""
        for number in range(start // BLOCK, -(-min(end, self._count) // BLOCK)):
            first = number * BLOCK
            names = zlib.decompress(self._blocks[number]).split(b"\0")
            yield from map(os.fsdecode, names[max(start - first, 0) : end - first])


_SEPARATOR = "//"  # between the parts of a stored entry; no relative path contains it


@dataclass(frozen=True)
class FolderItem(Item):
    """The image or video `name` below `root`.

    `caption_files`: None for the usual names. `row`: its captions in the metadata of a folder, or the problem of its
    row; used if no file beside the image has captions. `follow_links`: it and its captions may be links out of `root`.
    `labelled`: its folder is its class. `captioned`: its own captions are read. `mask`: see SourceConfig. `clip`: the
    part of a video to read. `references`: for an edit, the files of the images before it; the first `least` must exist.
    `mask_file`: None for the usual name.
    """

    index: int
    root: Path
    name: str
    caption_files: CaptionFiles | None = None
    row: tuple[Caption, ...] | str | None = None
    follow_links: bool = False
    labelled: bool = False
    captioned: bool = True
    mask: Literal["file", "alpha"] | None = None
    clip: Clip | None = None
    references: tuple[str, ...] | None = None
    mask_file: str | None = None
    least: int = 0

    @property
    def path(self) -> Path:
        """The file."""
        return self.root / self.name

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        label = folder_label(self.name) if self.labelled else None
        captions = self.captions()
        check_link(self.root, self.path, self.follow_links)
        if self.clip is not None and is_video(self.path):
            frames = partial(self._frames, self.clip, max_pixels)
            return Contents(frames, partial(sampled_digest, self.path), captions, label)
        with self._error_if_gone():
            data = read_file(self.path, IMAGE_BYTES)
        contents = contents_of(data, self.clip, max_pixels, captions, label)
        if self.references is not None:
            found = [self._read_neighbour(name) for name in self.references]
            files = [data for data in found if data is not None]
            if len(files) < self.least or None in found[: len(files)]:
                raise Unusable(f"reference {self.references[found.index(None)]} is missing")
            contents = with_references(contents, files, max_pixels)
        if self.mask == "alpha":
            return replace(contents, mask=partial(alpha, data, max_pixels))
        mask_file = self.mask_file or usual_mark(self.path.name, MASK)
        mask = self._read_neighbour(mask_file) if self.mask == "file" else None
        if mask is None:
            return contents
        image_digest = contents.digest
        return replace(
            contents,
            mask=lambda: decode_part("mask", mask, max_pixels).convert("L"),
            digest=lambda: xxhash.xxh3_64_intdigest(mask, image_digest()),
        )

    def _read_neighbour(self, name: str) -> bytes | None:
        """The bytes of a file in the folder of the image, if it exists."""
        path = self.path.parent / name
        root = path.parent if os.path.isabs(name) else self.root  # in a folder of masks
        return read_linked(root, path, self.follow_links, IMAGE_BYTES)

    def captions(self) -> tuple[Caption, ...]:
        """As Item.captions."""
        if not self.captioned:
            return ()
        files = self.caption_files or usual_files(self.path.stem)
        try:
            return captions_of(self.root, self.path.parent, files, self.follow_links)
        except Missing:
            if self.row is None:
                raise
        if isinstance(self.row, str):
            raise Unusable(self.row)
        return self.row

    def _frames(self, clip: Clip, max_pixels: int) -> Iterator[Image.Image]:
        with self._error_if_gone():
            yield from video_frames(self.path, clip, max_pixels)

    @contextlib.contextmanager
    def _error_if_gone(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if self.path.is_symlink():
                raise Unusable(f"{self.path.name} is a link to nothing") from None
            if not self.root.exists():
                raise unreadable(self.path, error) from None
            if empty := empty_folder_above(self.path):
                raise not_mounted(self.path, empty) from None
            raise Unusable(f"{self.path.name} is missing") from None


class ImageFolder:
    """All images below `root`, in the order of their relative paths. Linked folders are ignored."""

    def __init__(
        self, config: SourceConfig, key: str = "data.images", clip: Clip | None = None, references: range = range(0)
    ) -> None:
        """List the folder, with its videos if there is a `clip`. `references`: how many images come before an edit.

        Raises UserError, which names `key`, if the folder is missing or empty, or no image is an edit.
        """
        self.root = root = config.path
        self._links = config.follow_links
        self._mask = kind_of_mask(config)
        self._labelled, self._captioned = config.label is not None, reads_captions(config)
        self._clip, self._least = clip, min(references, default=0)
        suffixes = SUFFIXES if clip is None else (*SUFFIXES, *VIDEOS)
        self.class_names: set[str] = set()
        digest = xxhash.xxh3_128(b"follow_links\n" if self._links else b"")
        found = Listing(suffixes, config, key, max(references, default=0))
        if isinstance(config.mask, Path) and not config.mask.is_dir():
            raise UserError(
                f"{key}.mask: {config.mask} is not a folder; file and alpha are known, too"
                if config.mask.exists()
                else f"{key}.mask: the folder {config.mask} {not_there(config.mask)}; file and alpha are known, too"
            )
        try:
            self._names = Names(self._classified(_digested(found, digest)))
        except NotADirectoryError:
            raise UserError(f"{key}: {root} is not a folder") from None
        except FileNotFoundError as error:
            missing = not_there(root) if error.filename == str(root) else f"changes: {error.filename} is gone"
            raise UserError(f"{key}: the folder {root} {missing}") from None
        except OSError as error:
            raise UserError(f"{key}: {error.filename} cannot be listed: {error.strerror}") from None
        if not len(self._names):
            wanted = f"images{' or videos' if clip else ''} ({', '.join(suffixes)})"
            held = f", but {kinds}" if (kinds := counted(found.ignored)) else ""
            fix = conversion(found.ignored) or _lists_within(root)
            if clip is None and any(kind.lower().startswith(VIDEOS) for kind in found.ignored):
                fix = "; for videos set data.fps, and buckets of [frames, height, width]"
            raise UserError(f"{key}: {root} holds no {wanted}{held}{fix}")
        if references and not found.references:
            raise UserError(
                f"{key}: data.references is {references[-1]}, and {root} holds no references; put x.reference.png "
                "beside x.png, or set it to 0"
            )
        log_ignored(key, root, found.ignored)
        if self._mask == "file" and not found.masks:
            lacks = f"{root} holds no x.mask.png beside x.png"
            if isinstance(config.mask, Path):
                lacks = f"it holds no image with the name of one in {root}"
            log.notice(f"{key}.mask is {config.mask}, and {lacks}: all images count in full")
        if found.unread:
            log.notice(_unread(key, root, found.unread))
        if found.numbered and config.repeats == 1 and not self._labelled:
            log.notice(_unrepeated(key, root, found.numbered))
        masks = {"masks": self._mask} if self._mask else {}
        self.identity = {"kind": "folder", "count": len(self._names), "digest": digest.hexdigest(), **masks}

    def __len__(self) -> int:
        return len(self._names)

    def items(self, start: int, end: int) -> list[FolderItem]:
        """Images [start, end) of the order."""
        found = enumerate(map(_parsed, self._names.range(start, end)), start)
        how = self._links, self._labelled, self._captioned, self._mask, self._clip
        return [
            FolderItem(index, self.root, entry.name, files, row, *how, references, mask, self._least)
            for index, (entry, (files, row, references, mask)) in found
        ]

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return (_parsed(text)[0] for text in self._names.range(0, len(self._names)))

    def _classified(self, entries: Iterator[str]) -> Iterator[str]:
        """The entries. Collects the names of classes meanwhile."""
        for entry in entries:
            if self._labelled:
                with contextlib.suppress(Unusable):  # the image raises it when it is loaded
                    self.class_names.add(folder_label(entry.partition(_SEPARATOR)[0]))
            yield entry


def _unrepeated(key: str, root: Path, folders: Sequence[str]) -> str:
    first = folders[0].rstrip("/")
    count = how_many(len(folders), "folder")
    source = f"{{path: {root / first}, repeats: {first.partition('_')[0]}}}"
    return f"{key}: the numbers before the names of {count} repeat no image; for that, list them as {source}"


def _unread(key: str, root: Path, names: Sequence[str]) -> str:
    first = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
    lists = "; to read a list, name its path" if any(name.lower().endswith(".json") for name in names) else ""
    captions = how_many(len(names), "caption")
    return f"{key}: {captions} in {root} without an image of the same name: {shown(first)}{lists}"


def _lists_within(root: Path) -> str:
    lists = sorted(name for name in os.listdir(root) if os.path.splitext(name)[1].lower() in LISTS)
    return f"; it holds the list {lists[0]}: give its path instead" if lists else ""


def _digested(found: Listing, digest: xxhash.xxh3_128) -> Iterator[str]:
    """Sorted entries of images as text. Digests what changes the features: names and sizes of images and captions, and
    rows of metadata."""
    for name, files, captioned, row, *marks in found.images():
        sizes, times = zip(*files, strict=True)
        row_digest = "" if row is None else f" {xxhash.xxh3_64_hexdigest(row.encode())}"
        digest.update(os.fsencode(f"{name}\0{sizes}{row_digest}\n"))
        images, captions = (" ".join(map(str, each)) for each in ((sizes[0], *sizes[3:]), sizes[1:3]))
        details = [captioned, row, *marks]
        stored = json.dumps(details) if any(each is not None for each in details) else ""
        yield _SEPARATOR.join([name, images, captions + row_digest, " ".join(map(str, times)), stored])


_Details = tuple[CaptionFiles | None, tuple[Caption, ...] | str | None, tuple[str, ...] | None, str | None]
"""The `caption_files`, `row`, `references` and `mask_file` of an item."""


def _parsed(text: str) -> tuple[Entry, _Details]:
    """An entry from the text of `_digested`, and the details of its item."""
    name, image, captions, times, details = text.split(_SEPARATOR, 4)
    files, row, reference, mask = json.loads(details) if details else (None, None, None, None)
    cells = None if row is None else json.loads(row)
    found = tuple(Caption(*each) for each in cells) if isinstance(cells, list) else cells
    references = (reference,) if isinstance(reference, str) else reference and tuple(reference)
    return Entry(name, 1, image, captions, times), (files and tuple(files), found, references, mask)
