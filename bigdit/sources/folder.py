"""Folders: of pictures or videos, or of folders of numbered pictures, each of which is a video."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS
from bigdit.errors import UserError
from bigdit.sources.captions import captions_beside, check_link, folder_label, tell_passed_over
from bigdit.sources.disk import IMPOSSIBLE, PICTURE_BYTES, read_file, sampled_digest, unreadable
from bigdit.sources.picture import SUFFIXES, decode
from bigdit.sources.protocol import Contents, Entry, Readable, Unusable
from bigdit.sources.videos import SUFFIXES as VIDEOS
from bigdit.sources.videos import Clip, contents_of, is_video, resampled, video_frames

BLOCK = 1024


class Names:
    """File names in their order: 2 bytes each where they are numbered, 21 where they are 32 random characters."""

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


_BETWEEN = "//"  # the parts of an entry as it is kept: no relative path holds it
_MISSING = -1, -1


@dataclass(frozen=True)
class FolderItem(Readable):
    """The picture `name` below `root`; `follow_links`: also where it or its captions are links that lead out;
    `labelled`: the folder that it lies in is its class, and captions are not read; `clip`: what of videos is taken."""

    index: int
    root: Path
    name: str
    follow_links: bool = False
    labelled: bool = False
    clip: Clip | None = None

    @property
    def picture(self) -> Path:
        """The file."""
        return self.root / self.name

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        label = folder_label(self.name) if self.labelled else None
        captions = () if self.labelled else captions_beside(self.root, self.picture.with_suffix(""), self.follow_links)
        check_link(self.root, self.picture, self.follow_links)
        if self.clip is not None and is_video(self.picture):
            frames = partial(self._frames, self.clip, max_pixels)
            return Contents(frames, partial(sampled_digest, self.picture), captions, label)
        with self._vanished_told():
            data = read_file(self.picture, PICTURE_BYTES)
        return contents_of(data, self.clip, max_pixels, captions, label)

    def _frames(self, clip: Clip, max_pixels: int) -> Iterator[Image.Image]:
        with self._vanished_told():
            yield from video_frames(self.picture, clip, max_pixels)

    @contextlib.contextmanager
    def _vanished_told(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if self.picture.is_symlink():
                raise Unusable(f"{self.picture.name} is a link to nothing") from None
            raise unreadable(self.picture, error) from None


class ImageFolder:
    """All pictures below `root`, in the order of their relative paths; folders that are links are not entered."""

    def __init__(
        self,
        root: Path,
        key: str = "data.images",
        *,
        follow_links: bool = False,
        labelled: bool = False,
        clip: Clip | None = None,
    ) -> None:
        """List the folder, videos too where a `clip` of them is taken. Raises UserError, which names `key`, where it is
        missing or holds no pictures."""
        self.root = root
        self._follow_links = follow_links
        self._labelled = labelled
        self._clip = clip
        suffixes = SUFFIXES if clip is None else (*SUFFIXES, *VIDEOS)
        self.class_names: set[str] = set()
        digest = xxhash.xxh3_128(b"links are followed\n" if follow_links else b"")
        passed_over: Counter[str] = Counter()
        try:
            self._names = Names(self._classified(_digested(root, digest, suffixes, passed_over)))
        except NotADirectoryError:
            raise UserError(f"{key}: {root} is not a folder") from None
        except FileNotFoundError as error:
            missing = "does not exist" if error.filename == str(root) else f"changes: {error.filename} has vanished"
            raise UserError(f"{key}: the folder {root} {missing}") from None
        except OSError as error:
            raise UserError(f"{key}: {error.filename} cannot be listed: {error.strerror}") from None
        if not len(self._names):
            raise UserError(f"{key}: {root} holds no pictures{' or videos' if clip else ''} ({', '.join(suffixes)})")
        tell_passed_over(key, root, passed_over)
        self.identity = {"kind": "folder", "count": len(self._names), "digest": digest.hexdigest()}

    def __len__(self) -> int:
        return len(self._names)

    def items(self, start: int, end: int) -> list[FolderItem]:
        """Pictures [start, end) of the order."""
        names = enumerate((_entry(text).name for text in self._names.range(start, end)), start)
        how = (self._follow_links, self._labelled, self._clip)
        return [FolderItem(index, self.root, name, *how) for index, name in names]

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return map(_entry, self._names.range(0, len(self._names)))

    def _classified(self, entries: Iterator[str]) -> Iterator[str]:
        """The entries, the first folders of whose names are classes where pictures have labels."""
        for entry in entries:
            if self._labelled:
                with contextlib.suppress(Unusable):  # which its picture says when it is loaded
                    self.class_names.add(folder_label(_entry(entry).name))
            yield entry


def _digested(
    root: Path, digest: xxhash.xxh3_128, suffixes: Collection[str], passed_over: Counter[str]
) -> Iterator[str]:
    """Entries of pictures, sorted; names and sizes of pictures and captions go into the digest: a caption that was
    edited changes the features as much as a picture."""
    for name, found in _pictures(root, "", suffixes, passed_over):
        sizes, times = zip(*found, strict=True)
        digest.update(os.fsencode(f"{name}\0{sizes}\n"))
        yield _BETWEEN.join([name, str(sizes[0]), " ".join(map(str, sizes[1:])), " ".join(map(str, times))])


def _entry(text: str) -> Entry:
    name, picture, captions, times = text.split(_BETWEEN)
    return Entry(name, 1, picture, captions, times)


def _pictures(
    root: Path, folder: str, suffixes: Collection[str], passed_over: Counter[str]
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Relative paths of pictures below `folder`, sorted, with bytes and times of picture, `.json` and `.txt`, -1 for
    what is missing; what is neither is counted in `passed_over`.

    A folder is sorted as if its name ended in a slash, which gives the order of whole paths: one folder of each
    level is held at a time, never the whole tree.
    """
    descriptor = os.open(root / folder, os.O_RDONLY)  # paths from here are short: the kernel walks nothing twice
    try:
        entries = _entries(descriptor, passed_over)
        for name in sorted(entries):
            stem, suffix = os.path.splitext(name)
            if name.endswith("/"):
                yield from _pictures(root, folder + name, suffixes, passed_over)
            elif suffix.lower() in suffixes:
                # A listing tells what is missing; asking for it would be a round trip on a network file system.
                files = (name, f"{stem}.json", f"{stem}.txt")
                yield folder + name, [_seen(file, descriptor) if file in entries else _MISSING for file in files]
            elif suffix not in (".json", ".txt"):
                passed_over[f"{suffix or 'other'} file"[:20]] += 1
    finally:
        os.close(descriptor)


def _entries(descriptor: int, passed_over: Counter[str]) -> set[str]:
    """Names in a folder, those of folders with a slash."""
    entries = set()
    with os.scandir(descriptor) as scanned:
        for entry in scanned:
            if entry.is_symlink() and _is_folder(entry):
                passed_over["linked folder"] += 1
            else:
                entries.add(f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name)
    return entries


def _is_folder(link: os.DirEntry) -> bool:
    try:
        return link.is_dir()
    except OSError as error:
        if error.errno in IMPOSSIBLE:  # a link in a circle: loading it will tell
            return False
        raise


def _seen(name: str, descriptor: int) -> tuple[int, int]:
    """Bytes of a file, and the nanosecond when it was changed last."""
    try:
        status = os.stat(name, dir_fd=descriptor)
        return status.st_size, status.st_mtime_ns
    except OSError as error:
        if error.errno in (errno.ENOENT, *IMPOSSIBLE):
            return _MISSING  # a link to nothing, or in a circle: loading it will tell
        raise


@dataclass(frozen=True)
class FrameFolder(Readable):
    """The pictures of the folder `name` below `root`, in the order of their numbers, `step` seconds apart; the others
    as of FolderItem."""

    index: int
    root: Path
    name: str
    step: Fraction
    clip: Clip
    follow_links: bool

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        captions = captions_beside(self.root, self.root / self.name, self.follow_links)
        return Contents(lambda: (decode(each, max_pixels) for each in self._taken()), self._digest, captions)

    def _digest(self) -> int:
        digest = xxhash.xxh3_64()
        with contextlib.suppress(Unusable):  # which decoding says
            for data in self._taken():
                digest.update(data)
        return digest.intdigest()

    def _taken(self) -> Iterator[bytes]:
        """The bytes of the frames that are taken."""
        folder = self.root / self.name
        try:
            names = frames_within(os.listdir(folder))
            timed = ((number * self.step, self.step, name) for number, name in enumerate(names))
            for name in resampled(timed, self.clip):
                check_link(self.root, folder / name, self.follow_links)
                yield read_file(folder / name, PICTURE_BYTES)
        except FileNotFoundError as error:
            raise unreadable(folder, error) from None


class FrameFolders:
    """All folders below `root` that hold pictures, `frame_rate` of which are a second; links are not entered."""

    class_names: Collection[str] = ()

    def __init__(self, root: Path, key: str, *, frame_rate: float, clip: Clip, follow_links: bool) -> None:
        """List them. Raises UserError, which names `key`, where there are none or they cannot be listed."""
        self.root, self._clip = root, clip
        self._step = Clip(frame_rate, 1).step
        self._follow_links = follow_links
        digest = xxhash.xxh3_128(f"frames {self._step} apart, links {follow_links}\n".encode())
        passed_over: Counter[str] = Counter()
        try:
            self._entries = list(_digested_frames(root, digest, passed_over))
            self._names = Names(entry.name for entry in self._entries)
        except OSError as error:
            raise UserError(f"{key}: {error.filename} cannot be listed: {error.strerror}") from None
        if not len(self._names):
            raise UserError(f"{key}: {root} holds no folders of pictures, which frame_rate is of; leave frame_rate out")
        tell_passed_over(key, root, passed_over)
        self.identity = {"kind": "folder", "count": len(self._names), "digest": digest.hexdigest()}

    def __len__(self) -> int:
        return len(self._names)

    def entries(self) -> Iterator[Entry]:
        """As Source.entries."""
        return iter(self._entries)

    def items(self, start: int, end: int) -> list[FrameFolder]:
        """Videos [start, end) of the order."""
        names = enumerate(self._names.range(start, end), start)
        how = (self._step, self._clip, self._follow_links)
        return [FrameFolder(index, self.root, name, *how) for index, name in names]


def frames_within(names: list[str]) -> list[str]:
    """The pictures among the names of a folder, by their last numbers: `2.png` before `10.png`."""

    def number(name: str) -> tuple[int, str]:
        found = re.findall(r"\d+", os.path.splitext(name)[0])
        return (int(found[-1]) if found else -1), name

    return sorted((name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES), key=number)


def _digested_frames(root: Path, digest: xxhash.xxh3_128, passed_over: Counter[str]) -> Iterator[Entry]:
    """Entries of folders with pictures; with the names and sizes of these, and sizes of captions, digested. What
    else is there is counted in `passed_over`, pictures in no folder too."""
    for folder in _below(root, passed_over):
        names = os.listdir(folder)
        frames = frames_within(names)
        taken = frames if folder != root else []
        for name in set(names) - set(taken):
            if (suffix := os.path.splitext(name)[1]) not in (".json", ".txt") and (folder / name).is_file():
                passed_over[f"{suffix or 'other'} file"[:20]] += 1
        if taken:
            name = os.path.relpath(folder, root)
            files = [*(folder / frame for frame in frames), Path(f"{folder}.json"), Path(f"{folder}.txt")]
            sizes, times = zip(*map(_seen_file, files), strict=True)
            lines = [f"{os.path.relpath(each, root)}\0{size}\n" for each, size in zip(files, sizes, strict=True)]
            digest.update(os.fsencode("".join(lines)))
            frames_digest, when = (_digest_of(each) for each in ("".join(lines[:-2]), str(times)))
            yield Entry(name, 1, frames_digest, f"{sizes[-2]} {sizes[-1]}", when)


def _digest_of(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(os.fsencode(text))


def _below(folder: Path, passed_over: Counter[str]) -> Iterator[Path]:
    """A folder and those within, sorted; linked folders are counted in `passed_over`."""
    yield folder
    with os.scandir(folder) as entries:
        found = list(entries)
    passed_over["linked folder"] += sum(entry.is_symlink() and os.path.isdir(entry) for entry in found)
    for name in sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False)):
        yield from _below(folder / name, passed_over)


def _seen_file(file: Path) -> tuple[int, int]:
    """Bytes of a file, and the nanosecond when it was changed last."""
    try:
        status = file.stat()
        return status.st_size, status.st_mtime_ns
    except OSError:
        return -1, -1  # missing, or a link to nothing: loading it will tell
