"""A folder of folders of numbered pictures: each of them is a video, with its captions beside it."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import xxhash

from bigdit.config.data import MAX_PIXELS
from bigdit.errors import UserError
from bigdit.sources.beside import captions_beside, check_link, tell_passed_over
from bigdit.sources.disk import PICTURE_BYTES, read_file, unreadable
from bigdit.sources.names import Names
from bigdit.sources.picture import SUFFIXES, decode
from bigdit.sources.protocol import Contents, Entry, Readable, Unusable
from bigdit.sources.videos.resample import Clip, resampled


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
            self._entries = list(_digested(root, digest, passed_over))
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


def _digested(root: Path, digest: xxhash.xxh3_128, passed_over: Counter[str]) -> Iterator[Entry]:
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
            sizes, times = zip(*map(_seen, files), strict=True)
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


def _seen(file: Path) -> tuple[int, int]:
    """Bytes of a file, and the nanosecond when it was changed last."""
    try:
        status = file.stat()
        return status.st_size, status.st_mtime_ns
    except OSError:
        return -1, -1  # missing, or a link to nothing: loading it will tell
