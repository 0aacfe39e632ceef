"""A folder of pictures, each with its captions beside it in a `.json` or a `.txt` file of its name, or in the folder of
its class."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from bigdit import log
from bigdit.errors import UserError
from bigdit.sources.captions import json_captions, text_captions
from bigdit.sources.disk import CAPTION_BYTES, IMPOSSIBLE, PICTURE_BYTES, leads_out, read_file, unreadable
from bigdit.sources.labels import folder_label
from bigdit.sources.names import Names
from bigdit.sources.picture import SUFFIXES, decode
from bigdit.sources.protocol import Caption, Sample, Unusable


@dataclass(frozen=True)
class FolderItem:
    """The picture `name` below `root`; `follow_links`: also where it or its captions are links that lead out;
    `labelled`: the folder that it lies in is its class, and captions are not read."""

    index: int
    root: Path
    name: str
    follow_links: bool = False
    labelled: bool = False

    @property
    def picture(self) -> Path:
        """The file."""
        return self.root / self.name

    def load(self) -> Sample:
        """As Item.load."""
        label = folder_label(self.name) if self.labelled else None
        captions = () if self.labelled else self._captions()
        try:
            data = self._read(self.picture, PICTURE_BYTES)
        except FileNotFoundError as error:
            if self.picture.is_symlink():
                raise Unusable(f"{self.picture.name} is a link to nothing") from None
            raise unreadable(self.picture, error) from None
        return Sample(decode(data), captions, label)

    def _captions(self) -> tuple[Caption, ...]:
        """Of the `.json` where it has captions, else of the `.txt`."""
        captions = None
        try:
            path = self.picture.with_suffix(".json")
            captions = json_captions(self._read(path, CAPTION_BYTES), path.name)
        except FileNotFoundError:
            pass
        if captions is not None:
            return captions
        path = self.picture.with_suffix(".txt")
        try:
            return text_captions(self._read(path, CAPTION_BYTES), path.name)
        except FileNotFoundError:
            raise Unusable(f"caption {path.name} is missing") from None

    def _read(self, path: Path, limit: int) -> bytes:
        if not self.follow_links and leads_out(self.root, path):
            raise Unusable(f"{path.name} is a link out of its folder, and is read with the source's follow_links alone")
        return read_file(path, limit)


class ImageFolder:
    """All pictures below `root`, in the order of their relative paths; folders that are links are not entered."""

    def __init__(
        self, root: Path, key: str = "data.images", *, follow_links: bool = False, labelled: bool = False
    ) -> None:
        """List the folder. Raises UserError, which names `key`, where it is missing or holds no pictures."""
        self.root = root
        self._follow_links = follow_links
        self._labelled = labelled
        self.class_names: set[str] = set()
        digest = xxhash.xxh3_128(b"links are followed\n" if follow_links else b"")
        passed_over: Counter[str] = Counter()
        try:
            self._names = Names(self._classified(_digested(root, digest, passed_over)))
        except NotADirectoryError:
            raise UserError(f"{key}: {root} is not a folder") from None
        except FileNotFoundError as error:
            missing = "does not exist" if error.filename == str(root) else f"changes: {error.filename} has vanished"
            raise UserError(f"{key}: the folder {root} {missing}") from None
        except OSError as error:
            raise UserError(f"{key}: {error.filename} cannot be listed: {error.strerror}") from None
        if not len(self._names):
            raise UserError(f"{key}: {root} holds no pictures ({', '.join(SUFFIXES)})")
        if passed_over:
            kinds = ", ".join(f"{count} {kind}" for kind, count in passed_over.most_common(5))
            log.notice(f"{key}: {root} also holds what is not read: {kinds}")
        self.identity = {"kind": "folder", "count": len(self._names), "digest": digest.hexdigest()}

    def __len__(self) -> int:
        return len(self._names)

    def items(self, start: int, end: int) -> list[FolderItem]:
        """Pictures [start, end) of the order."""
        names = enumerate(self._names.range(start, end), start)
        return [FolderItem(index, self.root, name, self._follow_links, self._labelled) for index, name in names]

    def _classified(self, names: Iterator[str]) -> Iterator[str]:
        """The names, whose first folders are classes where pictures have labels."""
        for name in names:
            if self._labelled:
                with contextlib.suppress(Unusable):  # which its picture says when it is loaded
                    self.class_names.add(folder_label(name))
            yield name


def _digested(root: Path, digest: xxhash.xxh3_128, passed_over: Counter[str]) -> Iterator[str]:
    """Names of pictures, sorted; names and sizes of pictures and captions go into the digest: a caption that was
    edited changes the features as much as a picture."""
    for name, sizes in _pictures(root, "", passed_over):
        digest.update(os.fsencode(f"{name}\0{sizes}\n"))
        yield name


def _pictures(root: Path, folder: str, passed_over: Counter[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Relative paths of pictures below `folder`, sorted, with the bytes of picture, `.json` and `.txt`, -1 for what
    is missing; what is neither is counted in `passed_over`.

    A folder is sorted as if its name ended in a slash, which gives the order of whole paths: one folder of each
    level is held at a time, never the whole tree.
    """
    descriptor = os.open(root / folder, os.O_RDONLY)  # paths from here are short: the kernel walks nothing twice
    try:
        entries = _entries(descriptor, passed_over)
        for name in sorted(entries):
            stem, suffix = os.path.splitext(name)
            if name.endswith("/"):
                yield from _pictures(root, folder + name, passed_over)
            elif suffix.lower() in SUFFIXES:
                # A listing tells what is missing; asking for it would be a round trip on a network file system.
                files = (name, f"{stem}.json", f"{stem}.txt")
                yield folder + name, tuple(_size(file, descriptor) if file in entries else -1 for file in files)
            elif suffix not in (".json", ".txt"):
                passed_over[f"{suffix or 'other'} files"[:20]] += 1
    finally:
        os.close(descriptor)


def _entries(descriptor: int, passed_over: Counter[str]) -> set[str]:
    """Names in a folder, those of folders with a slash."""
    entries = set()
    with os.scandir(descriptor) as scanned:
        for entry in scanned:
            if entry.is_symlink() and _is_folder(entry):
                passed_over["links to folders"] += 1
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


def _size(name: str, descriptor: int) -> int:
    try:
        return os.stat(name, dir_fd=descriptor).st_size
    except OSError as error:
        if error.errno in (errno.ENOENT, *IMPOSSIBLE):
            return -1  # a link to nothing, or in a circle: loading it will tell
        raise
