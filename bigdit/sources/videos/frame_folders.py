"""A folder of folders of numbered pictures: each of them is a video, with its captions beside it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS
from bigdit.errors import UserError
from bigdit.sources.beside import captions_beside, check_link, tell_passed_over
from bigdit.sources.disk import PICTURE_BYTES, read_file, unreadable
from bigdit.sources.names import Names
from bigdit.sources.picture import SUFFIXES, decode
from bigdit.sources.protocol import Sample
from bigdit.sources.videos.resample import Clip, resampled


@dataclass(frozen=True)
class FrameFolder:
    """The pictures of the folder `name` below `root`, in the order of their numbers, `step` seconds apart; the others
    as of FolderItem."""

    index: int
    root: Path
    name: str
    step: Fraction
    clip: Clip
    follow_links: bool

    def load(self, max_pixels: int = MAX_PIXELS) -> Sample:
        """As Item.load."""
        folder = self.root / self.name
        return Sample(self._frames(folder, max_pixels), captions_beside(self.root, folder, self.follow_links))

    def _frames(self, folder: Path, max_pixels: int) -> Iterator[Image.Image]:
        """Of those that are taken alone."""
        try:
            names = frames_within(os.listdir(folder))
            timed = ((number * self.step, self.step, name) for number, name in enumerate(names))
            for name in resampled(timed, self.clip):
                check_link(self.root, folder / name, self.follow_links)
                yield decode(read_file(folder / name, PICTURE_BYTES), max_pixels)
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
            self._names = Names(_digested(root, digest, passed_over))
        except OSError as error:
            raise UserError(f"{key}: {error.filename} cannot be listed: {error.strerror}") from None
        if not len(self._names):
            raise UserError(f"{key}: {root} holds no folders of pictures, which frame_rate is of; leave frame_rate out")
        tell_passed_over(key, root, passed_over)
        self.identity = {"kind": "folder", "count": len(self._names), "digest": digest.hexdigest()}

    def __len__(self) -> int:
        return len(self._names)

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


def _digested(root: Path, digest: xxhash.xxh3_128, passed_over: Counter[str]) -> Iterator[str]:
    """Relative paths of folders with pictures; with the names and sizes of these, and sizes of captions, digested. What
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
            for file in files:
                digest.update(os.fsencode(f"{os.path.relpath(file, root)}\0{_size(file)}\n"))
            yield name


def _below(folder: Path, passed_over: Counter[str]) -> Iterator[Path]:
    """A folder and those within, sorted; linked folders are counted in `passed_over`."""
    yield folder
    with os.scandir(folder) as entries:
        found = list(entries)
    passed_over["linked folder"] += sum(entry.is_symlink() and os.path.isdir(entry) for entry in found)
    for name in sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False)):
        yield from _below(folder / name, passed_over)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1  # missing, or a link to nothing: loading it will tell
