"""Folders of images and videos, and folders of frame folders: numbered images that make one video."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal

import xxhash
from PIL import Image

from bigdit import log
from bigdit.config.data import MAX_PIXELS, MOST_REFERENCES, SourceConfig
from bigdit.errors import UserError, shown
from bigdit.sources.captions import (
    LISTS,
    OF_SAMPLES,
    CaptionFiles,
    Missing,
    caption_files,
    captions_of,
    check_link,
    conversion,
    counted,
    folder_label,
    log_ignored,
    odd_names,
    plain_name,
    read_linked,
    reads_captions,
    usual_files,
)
from bigdit.sources.captions import (
    SUFFIXES as CAPTIONS,
)
from bigdit.sources.disk import (
    IMAGE_BYTES,
    IMPOSSIBLE,
    empty_folder_above,
    not_mounted,
    not_there,
    read_file,
    sampled_digest,
    unreadable,
)
from bigdit.sources.image import (
    MASK,
    REFERENCE,
    SUFFIXES,
    alpha,
    decode,
    decode_part,
    marked,
    owner,
    reference_marks,
    usual_mark,
    with_references,
)
from bigdit.sources.protocol import Caption, Contents, Entry, Item, Unusable
from bigdit.sources.text_rows import METADATA, Metadata
from bigdit.sources.videos import SUFFIXES as VIDEOS
from bigdit.sources.videos import Clip, contents_of, is_video, resampled, video_frames
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
_MISSING = -1, -1


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
        self._mask = _kind_of_mask(config)
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


_REPEATED = re.compile(r"([2-9]|[1-9]\d{1,2})_.*/")
"""Names of folders that kohya's scripts repeat."""


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


_Found = tuple[str, list[tuple[int, int]], CaptionFiles | None, str | None, str | list[str] | None, str | None]
"""An image: its relative path; the sizes and times of its image, JSON, text, mask and references, -1 for a missing one;
its caption files, None for the usual ones; its row of metadata in JSON; its reference or references; its mask, None for
the usual one."""


class Listing:
    """The images with `suffixes` below a folder. `edited`: the most references of an image.

    It counts the `masks` and `references` of images, and other files in `ignored`. `unread`: captions without an image
    of the same name; `numbered`: folders that kohya's scripts would repeat. A folder is sorted as if its name ended in
    a slash, which is the order of whole paths. So memory holds one folder of each level, never the whole tree.
    """

    def __init__(self, suffixes: Collection[str], config: SourceConfig, key: str, edited: int = 0) -> None:
        self._suffixes, self._config, self._key, self._edited = suffixes, config, key, reference_marks(edited)
        self.ignored: Counter[str] = Counter()
        self.masks = self.references = 0
        self.unread: list[str] = []
        self.numbered: list[str] = []

    def images(self, folder: str = "", above: Sequence[Metadata] = ()) -> Iterator[_Found]:
        """The images below a relative folder. `above`: the metadata of folders above, the nearest first."""
        root = self._config.path
        descriptor = os.open(root / folder, os.O_RDONLY)  # paths from here are short, so the kernel walks less
        try:
            entries = _entries(descriptor, self.ignored)
            captioned, masked = self._config.caption is None, _kind_of_mask(self._config) == "file"
            odd = odd_names(entries)
            own = self._metadata(folder, entries)
            tables = above if own is None else (own, *above)
            marked_files, masks, references = self._marked(entries)
            if isinstance(self._config.mask, Path):
                masks = _masks_within(self._config.mask.absolute() / folder)
                self.masks += len(masks.keys() & set(map(owner, filter(_is_image, entries))))
            captions_found, caption_names = 0, list[str]()
            for name in sorted(entries):
                suffix = os.path.splitext(name)[1]
                if name.endswith("/"):
                    if isinstance(self._config.mask, Path) and _same(root / folder / name, self._config.mask):
                        continue
                    if not folder and _REPEATED.fullmatch(name):
                        self.numbered.append(name)
                    yield from self.images(folder + name, tables)
                elif name in marked_files:
                    continue
                elif suffix.lower() in self._suffixes:
                    captions = caption_files(name, entries, odd)
                    captions_found += sum(each in entries for each in captions)
                    usual_mask = usual_mark(name, MASK)
                    mask = (masks and masks.get(owner(name))) or usual_mask
                    # The listing shows what is missing. A stat would be a round trip on a network file system.
                    present = entries if captioned else entries & {name, mask}
                    listed = [name, *captions, *([mask] if masked else [])]
                    there = [file in present or os.path.isabs(file) for file in listed]  # masks of another folder
                    files = [
                        _size_and_time(file, descriptor) if is_there else _MISSING
                        for file, is_there in zip(listed, there, strict=True)
                    ]
                    edited = [found.get(owner(name)) or usual_mark(name, mark) for mark, found in references.items()]
                    files += [_size_and_time(each, descriptor) for each in edited]
                    reference = edited if len(edited) > 1 else edited[0] if edited else None
                    row = tables[0].row(folder + name, captions[1] in entries) if tables else None
                    for further in tables[1:]:
                        further.leave(folder + name)
                    usual = usual_files(os.path.splitext(name)[0])
                    own_mask = mask if masked and mask != usual_mask else None
                    yield folder + name, files, None if captions == usual else captions, row, reference, own_mask
                elif suffix.lower() in CAPTIONS:
                    caption_names += [name] if name != OF_SAMPLES else []
                elif name not in METADATA:
                    self.ignored[f"{suffix or 'other'} file"[:20]] += 1
            if len(caption_names) > captions_found and reads_captions(self._config):
                self.unread += _without_image(folder, caption_names, entries)
            if own is not None:
                own.log_unused()
        finally:
            os.close(descriptor)

    def _metadata(self, folder: str, entries: Collection[str]) -> Metadata | None:
        names = [name for name in METADATA if name in entries and reads_captions(self._config)]
        if len(names) > 1:
            unread = self._config.path / folder / names[1]
            log.notice(f"{self._key}: {unread} is ignored, because {names[0]} is beside it; put its rows there")
        return Metadata(folder, names[0], self._config, self._key) if names else None

    def _marked(self, entries: Collection[str]) -> tuple[set[str], dict[str, str], dict[str, dict[str, str]]]:
        """All masks and references in a folder, which are no images by themselves; the masks by owner; the references
        by mark and owner. Counts those that the source does not use in `ignored`."""
        marked_by, all_marked = dict[str, dict[str, str]](), set[str]()
        referring = {name for name in entries if REFERENCE in name.lower()}  # most folders have none
        marks = [(MASK, self._config.mask == "file", entries), (REFERENCE, REFERENCE in self._edited, entries)]
        marks += [(each, each in self._edited, referring) for each in reference_marks(MOST_REFERENCES)[1:]]
        for mark, used, names in marks:
            found = marked(names, mark)
            if found and not used:
                owners = {owner(name) for name in entries if name not in found and _is_image(name)}
                found = {name: stem for name, stem in found.items() if stem in owners}
                self.ignored[mark.removeprefix(".")] += len(found)
            all_marked |= found.keys()
            marked_by[mark] = {stem: name for name, stem in found.items()} if used else {}
        references = {mark: marked_by[mark] for mark in self._edited}
        self.masks += len(marked_by[MASK])
        self.references += sum(map(len, references.values()))
        return all_marked, marked_by[MASK], references


def _kind_of_mask(config: SourceConfig) -> Literal["file", "alpha"] | None:
    return "file" if isinstance(config.mask, Path) else config.mask


def _same(one: Path, other: Path) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)


def _masks_within(folder: Path) -> dict[str, str]:
    """The paths of the images in a folder of masks, by the stem of their image."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return {owner(name): str(folder / name) for name in names if _is_image(name)}


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _without_image(folder: str, names: Sequence[str], entries: Collection[str]) -> list[str]:
    """The caption files of a folder that have the name of no image or video there."""
    images = [plain_name(name) for name in entries if os.path.splitext(name)[1].lower() in (*SUFFIXES, *VIDEOS)]
    stems = {each for name in images for each in (name, os.path.splitext(name)[0])}
    return [folder + name for name in names if plain_name(os.path.splitext(name)[0]) not in stems]


def _entries(descriptor: int, ignored: Counter[str]) -> set[str]:
    """Names in a folder, without hidden ones, as macOS and notebooks leave them. Names of folders end in a slash."""
    entries = set()
    with os.scandir(descriptor) as scanned:
        for entry in scanned:
            if entry.name.startswith("."):
                ignored["hidden file"] += 1
            elif entry.is_symlink() and _is_folder(entry):
                ignored["linked folder"] += 1
            else:
                entries.add(f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name)
    return entries


def _is_folder(link: os.DirEntry) -> bool:
    try:
        return link.is_dir()
    except OSError as error:
        if error.errno in IMPOSSIBLE:  # a link in a circle; loading it raises
            return False
        raise


def _size_and_time(name: str | Path, descriptor: int | None = None) -> tuple[int, int]:
    """The bytes of a file, and the time of its last change in nanoseconds."""
    try:
        status = os.stat(name, dir_fd=descriptor)
        return status.st_size, status.st_mtime_ns
    except OSError as error:
        if error.errno in (errno.ENOENT, *IMPOSSIBLE):
            return _MISSING  # missing, a link to nothing, or in a circle; loading it raises
        raise


@dataclass(frozen=True)
class FrameFolder(Item):
    """A video: the images of the folder `name` below `root`, in the order of their numbers, `step` seconds apart."""

    index: int
    root: Path
    name: str
    step: Fraction
    clip: Clip
    follow_links: bool
    captioned: bool = True

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        return Contents(lambda: (decode(each, max_pixels) for each in self._frames()), self._digest, self.captions())

    def captions(self) -> tuple[Caption, ...]:
        """As Item.captions."""
        folder = self.root / self.name
        files = usual_files(folder.name)
        return captions_of(self.root, folder.parent, files, self.follow_links) if self.captioned else ()

    def _digest(self) -> int:
        digest = xxhash.xxh3_64()
        with contextlib.suppress(Unusable):  # decoding raises it
            for data in self._frames():
                digest.update(data)
        return digest.intdigest()

    def _frames(self) -> Iterator[bytes]:
        """The bytes of each frame of the clip."""
        folder = self.root / self.name
        try:
            names = frames_within(os.listdir(folder))
            timed = ((number * self.step, self.step, name) for number, name in enumerate(names))
            for name in resampled(timed, self.clip):
                check_link(self.root, folder / name, self.follow_links)
                yield read_file(folder / name, IMAGE_BYTES)
        except FileNotFoundError as error:
            raise unreadable(folder, error) from None


class FrameFolders:
    """All folders of images below `root`, with `frame_rate` images a second. Linked folders are ignored."""

    class_names: Collection[str] = ()

    def __init__(self, config: SourceConfig, key: str, frame_rate: float, clip: Clip) -> None:
        """List the folders. Raises UserError, which names `key`, if there are none or they cannot be listed."""
        self.root = root = config.path
        self._step = Clip(frame_rate, 1).step
        self._how = self._step, clip, config.follow_links, reads_captions(config)
        digest = xxhash.xxh3_128(f"frames {self._step} apart, links {config.follow_links}\n".encode())
        ignored: Counter[str] = Counter()
        try:
            self._entries = list(_digested_frames(root, digest, ignored))
        except OSError as error:
            raise UserError(f"{key}: {error.filename} cannot be listed: {error.strerror}") from None
        if not self._entries:
            raise UserError(f"{key}: {root} holds no folders of images, as frame_rate needs; leave frame_rate out")
        log_ignored(key, root, ignored)
        self.identity = {"kind": "folder", "count": len(self), "digest": digest.hexdigest()}

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return iter(self._entries)

    def items(self, start: int, end: int) -> list[FrameFolder]:
        """Videos [start, end) of the order."""
        entries = enumerate(self._entries[start:end], start)
        return [FrameFolder(index, self.root, entry.name, *self._how) for index, entry in entries]


def frames_within(names: list[str]) -> list[str]:
    """The images among file names, without hidden ones, sorted by their last numbers: `2.png` before `10.png`."""

    def number(name: str) -> tuple[int, str]:
        found = re.findall(r"\d+", os.path.splitext(name)[0])
        return (int(found[-1]) if found else -1), name

    return sorted((name for name in names if _is_image(name) and not name.startswith(".")), key=number)


def _digested_frames(root: Path, digest: xxhash.xxh3_128, ignored: Counter[str]) -> Iterator[Entry]:
    """Entries of folders with images. Digests the names and sizes of images, and the sizes of captions.

    Counts other files, and images outside a folder, in `ignored`.
    """
    for folder in _folders_below(root, ignored):
        names = os.listdir(folder)
        frames = frames_within(names) if folder != root else []
        for name in set(names) - set(frames):
            if (suffix := os.path.splitext(name)[1]) not in (".json", ".txt") and (folder / name).is_file():
                ignored[f"{suffix or 'other'} file"[:20]] += 1
        if frames:
            name = os.path.relpath(folder, root)
            files = [*(folder / frame for frame in frames), Path(f"{folder}.json"), Path(f"{folder}.txt")]
            sizes, times = zip(*map(_size_and_time, files), strict=True)
            lines = [f"{os.path.relpath(each, root)}\0{size}\n" for each, size in zip(files, sizes, strict=True)]
            digest.update(os.fsencode("".join(lines)))
            contents, changed = (
                xxhash.xxh3_64_hexdigest(os.fsencode(each)) for each in ("".join(lines[:-2]), str(times))
            )
            yield Entry(name, 1, contents, f"{sizes[-2]} {sizes[-1]}", changed)


def _folders_below(folder: Path, ignored: Counter[str]) -> Iterator[Path]:
    """A folder and all below it, sorted. Counts linked folders in `ignored`."""
    yield folder
    with os.scandir(folder) as entries:
        found = list(entries)
    ignored["linked folder"] += sum(entry.is_symlink() and os.path.isdir(entry) for entry in found)
    for name in sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False)):
        yield from _folders_below(folder / name, ignored)
