"""Folders of frame folders: numbered images that make one video."""

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

from bigdit.config.data import MAX_PIXELS, SourceConfig
from bigdit.errors import UserError
from bigdit.sources.captions import captions_of, check_link, log_ignored, reads_captions, usual_files
from bigdit.sources.disk import IMAGE_BYTES, read_file, unreadable
from bigdit.sources.image import decode
from bigdit.sources.listing import is_image, size_and_time
from bigdit.sources.protocol import Caption, Contents, Entry, Item, Unusable
from bigdit.sources.videos import Clip, resampled


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

    return sorted((name for name in names if is_image(name) and not name.startswith(".")), key=number)


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
            sizes, times = zip(*map(size_and_time, files), strict=True)
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
