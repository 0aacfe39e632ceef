"""The files of a folder, in the order of whole paths, with their captions, masks and references."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bigdit import log
from bigdit.config.data import MOST_REFERENCES, SourceConfig
from bigdit.sources.captions import (
    OF_SAMPLES,
    CaptionFiles,
    caption_files,
    odd_names,
    plain_name,
    reads_captions,
    usual_files,
)
from bigdit.sources.captions import SUFFIXES as CAPTIONS
from bigdit.sources.disk import IMPOSSIBLE
from bigdit.sources.image import MASK, REFERENCE, SUFFIXES, marked, owner, reference_marks, usual_mark
from bigdit.sources.text_rows import METADATA, Metadata
from bigdit.sources.videos import SUFFIXES as VIDEOS

_MISSING = -1, -1


_REPEATED = re.compile(r"([2-9]|[1-9]\d{1,2})_.*/")
"""Names of folders that kohya's scripts repeat."""


Found = tuple[str, list[tuple[int, int]], CaptionFiles | None, str | None, str | list[str] | None, str | None]
"""An image: its relative path; the sizes and times of its image, JSON, text, mask and references, -1 for a missing one;
its caption files, None for the usual ones; its row of metadata in JSON; its reference or references; its mask, None for
the usual one."""


@dataclass(frozen=True)
class _Folder:
    """A folder that is listed: the relative `name`, its entries, and which of them are masks and references.

    `marked`: all of these; `masks`: by owner; `references`: by mark and owner.
    """

    name: str
    descriptor: int
    entries: set[str]
    odd: dict[str, str]
    marked: set[str]
    masks: dict[str, str]
    references: dict[str, dict[str, str]]


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

    def images(self, folder: str = "", above: Sequence[Metadata] = ()) -> Iterator[Found]:
        """The images below a relative folder. `above`: the metadata of folders above, the nearest first."""
        descriptor = os.open(self._config.path / folder, os.O_RDONLY)  # short paths, so the kernel walks less
        try:
            here = self._opened(folder, descriptor)
            own = self._metadata(folder, here.entries)
            tables = above if own is None else (own, *above)
            captions_found, caption_names = 0, list[str]()
            for name in sorted(here.entries):
                suffix = os.path.splitext(name)[1]
                if name.endswith("/"):
                    if self._masks_are_in(folder + name):
                        continue
                    if not folder and _REPEATED.fullmatch(name):
                        self.numbered.append(name)
                    yield from self.images(folder + name, tables)
                elif name in here.marked:
                    continue
                elif suffix.lower() in self._suffixes:
                    captions = caption_files(name, here.entries, here.odd)
                    captions_found += sum(each in here.entries for each in captions)
                    yield self._found(here, name, captions, tables)
                elif suffix.lower() in CAPTIONS:
                    caption_names += [name] if name != OF_SAMPLES else []
                elif name not in METADATA:
                    self.ignored[f"{suffix or 'other'} file"[:20]] += 1
            if len(caption_names) > captions_found and reads_captions(self._config):
                self.unread += _without_image(folder, caption_names, here.entries)
            if own is not None:
                own.log_unused()
        finally:
            os.close(descriptor)

    def _opened(self, folder: str, descriptor: int) -> _Folder:
        entries = _entries(descriptor, self.ignored)
        marked_files, masks, references = self._marked(entries)
        if isinstance(self._config.mask, Path):
            masks = _masks_within(self._config.mask.absolute() / folder)
            self.masks += len(masks.keys() & set(map(owner, filter(is_image, entries))))
        return _Folder(folder, descriptor, entries, odd_names(entries), marked_files, masks, references)

    def _masks_are_in(self, folder: str) -> bool:
        mask = self._config.mask
        return isinstance(mask, Path) and os.path.abspath(self._config.path / folder) == os.path.abspath(mask)

    def _found(self, here: _Folder, name: str, captions: CaptionFiles, tables: Sequence[Metadata]) -> Found:
        masked, usual_mask = kind_of_mask(self._config) == "file", usual_mark(name, MASK)
        mask = here.masks.get(owner(name)) or usual_mask
        # The listing shows what is missing. A stat would be a round trip on a network file system.
        present = here.entries if self._config.caption is None else here.entries & {name, mask}
        listed = [name, *captions, *([mask] if masked else [])]
        there = [file in present or os.path.isabs(file) for file in listed]  # masks of another folder
        files = [
            size_and_time(file, here.descriptor) if is_there else _MISSING
            for file, is_there in zip(listed, there, strict=True)
        ]
        edited = [found.get(owner(name)) or usual_mark(name, mark) for mark, found in here.references.items()]
        files += [size_and_time(each, here.descriptor) for each in edited]
        reference = edited if len(edited) > 1 else edited[0] if edited else None
        row = tables[0].row(here.name + name, captions[1] in here.entries) if tables else None
        for further in tables[1:]:
            further.leave(here.name + name)
        usual = usual_files(os.path.splitext(name)[0])
        own_mask = mask if masked and mask != usual_mask else None
        return here.name + name, files, None if captions == usual else captions, row, reference, own_mask

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
                owners = {owner(name) for name in entries if name not in found and is_image(name)}
                found = {name: stem for name, stem in found.items() if stem in owners}
                self.ignored[mark.removeprefix(".")] += len(found)
            all_marked |= found.keys()
            marked_by[mark] = {stem: name for name, stem in found.items()} if used else {}
        references = {mark: marked_by[mark] for mark in self._edited}
        self.masks += len(marked_by[MASK])
        self.references += sum(map(len, references.values()))
        return all_marked, marked_by[MASK], references


def kind_of_mask(config: SourceConfig) -> Literal["file", "alpha"] | None:
    return "file" if isinstance(config.mask, Path) else config.mask


def _masks_within(folder: Path) -> dict[str, str]:
    """The paths of the images in a folder of masks, by the stem of their image."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return {owner(name): str(folder / name) for name in names if is_image(name)}


def is_image(name: str) -> bool:
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


def size_and_time(name: str | Path, descriptor: int | None = None) -> tuple[int, int]:
    """The bytes of a file, and the time of its last change in nanoseconds."""
    try:
        status = os.stat(name, dir_fd=descriptor)
        return status.st_size, status.st_mtime_ns
    except OSError as error:
        if error.errno in (errno.ENOENT, *IMPOSSIBLE):
            return _MISSING  # missing, a link to nothing, or in a circle; loading it raises
        raise
