"""Finds what was added to, removed from and edited in the sources of a store, so that only these images are encoded.

The store has a listing of each source: names, sizes and times of its files, and the indices of their images in the
store. Where a listing agrees, nothing is read. Files that differ, if only in their times, are read and compared with
the digests in the parts. An image with the same content keeps its index, whatever its name is now. The others get new
indices after all others.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bigdit import log
from bigdit.config.data import MAX_PIXELS
from bigdit.errors import UserError, shown
from bigdit.sources.open import SourceList
from bigdit.sources.protocol import Contents, Entry, Item, Source, Unusable
from bigdit.store.growth import begin_growth, latest_schema
from bigdit.store.lease import missing
from bigdit.store.listing import (
    Ints,
    indices_of,
    is_current,
    keyed,
    listing_path,
    live_indices,
    read_listing,
    with_indices,
    write_listing,
)
from bigdit.store.part import part_path
from bigdit.store.reader import Part
from bigdit.store.schema import (
    EXTRACT,
    Change,
    Range,
    Run,
    StoreSchema,
    as_read,
    check_same,
    part_identity,
    read_schema,
)
from bigdit.units import how_many

Digests = tuple[int, int]
"""The digests of an image and of its captions or label; (0, 0) if they cannot be read."""

_NAMED = 3  # the names that a message has for each kind of change
_READERS = 8  # threads that read files
_CHUNK = 64  # items that a thread reads at a time


@dataclass
class _Changes:
    """What changed in a source. `places`: the index in the store of each of its images, −1 for new ones.

    `listed`: its listing agrees. `gone`: indices that are not used any more, each with the image that replaces it or
    None. `names`: the names of gone images. `edited`: images that replace another, and whether only their captions
    differ. `digests`: of the images that were read.
    """

    places: Ints
    listed: bool = False
    gone: dict[int, int | None] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    edited: list[tuple[int, bool]] = field(default_factory=list)
    digests: dict[int, Digests] = field(default_factory=dict)

    @property
    def new(self) -> list[int]:
        """The images without an index in the store."""
        return np.flatnonzero(self.places < 0).tolist()


def grow(
    root: Path, found: StoreSchema, requested: StoreSchema, source: SourceList, *, by_content: bool
) -> tuple[StoreSchema, list[str]]:
    """Begin the growth of the store `found` by the changes of its sources, and write their listings.

    Returns the new schema, and a message for each source that changed. `requested`: the schema of the run. With
    `by_content`, all files are read. Raises UserError if the run has other settings or sources, if a file or part
    cannot be read, and as begin_growth.
    """
    _check_sources(root, found, requested)
    count, known, all_changes = found.count, len(found.current), list[_Changes]()
    added, gone, lines = list[dict[str, Any]](), list[Run](), list[str]()
    for number, inner in enumerate(source.sources[:known]):
        changes = _changes(root, found, requested, number, inner, by_content)
        new = changes.new
        if new or changes.gone:
            lines.append(f"data.images[{number}] changed: {_summary(inner, changes)}; only changes are encoded")
        if new:
            digest = _digest_of_new(inner, changes)
            added.append({"kind": "added", "count": len(new), "digest": digest, "of": number})
        at = {image: count + place for place, image in enumerate(new)}
        gone += _runs({index: -1 if by is None else at[by] for index, by in changes.gone.items()})
        changes.places[new] = np.arange(count, count := count + len(new))
        all_changes.append(changes)
    for inner in source.sources[known:]:
        all_changes.append(_Changes(np.arange(count, count := count + len(inner))))
    schema = found.model_copy(update={"sources": [*found.sources, *added, *requested.sources[known:]]})
    if added or gone or requested.sources != schema.current:
        schema = schema.model_copy(update={"changes": [*found.changes, Change(sources=requested.sources, gone=gone)]})
    schema = as_read(schema)
    begin_growth(root, found, schema)  # may refuse the extraction, so it comes before the listings
    for number, (inner, changes) in enumerate(zip(source.sources, all_changes, strict=True)):
        if not changes.listed or schema.changes != found.changes:
            write_listing(root, schema, number, inner, changes.places)
    return schema, lines


def not_encoded(root: Path, source: SourceList) -> list[str]:
    """A message for each source that is not the one that was encoded: its files differ in name, size or time, it has
    other settings, or it is new. Also for changes of which parts are missing, and for sources that the run lacks."""
    schema = latest_schema(root)
    if schema is None:
        return []
    lines, known = list[str](), schema.current
    requested = json.loads(json.dumps(source.identity["sources"]))  # tuples become lists, as in the schema
    if schema != read_schema(root):
        lines.append(f"the last changes of data.images are not all encoded into {root}; {EXTRACT} finishes it")
    for number, (inner, now) in enumerate(zip(source.sources, requested, strict=True)):
        if number >= len(known):
            lines.append(f"data.images[{number}] is not encoded into {root}; {EXTRACT} adds it")
            continue
        agrees, then = is_current(listing_path(root, schema, number), inner), known[number]
        if any(now.get(key) != then.get(key) for key in (now | then).keys() - {*_FILES}) or (agrees and now != then):
            lines.append(
                f"data.images[{number}] had other settings when it was encoded into {root}; set them back, or set "
                "another data.features and extract again"
            )
        elif not agrees:
            lines.append(
                f"data.images[{number}] changed since it was encoded into {root}; {EXTRACT} encodes what changed"
            )
    if len(known) > len(requested):
        sources = how_many(len(known), "source")
        lines.append(f"{root} has {sources}, and data.images {len(requested)}; training takes all of {root}")
    return lines


@dataclass(frozen=True)
class _GoneItem(Item):
    """An image that was encoded, and is no longer in its source."""

    index: int
    name: str = "an image"

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        raise Unusable("it is no longer in its source")


class Numbered:
    """The images of sources by their indices in the store."""

    def __init__(self, source: SourceList, places: Ints) -> None:
        """`places`: for each index, the number of the image in `source`; −1 where it is gone."""
        self._source, self._places = source, places

    def items(self, start: int, end: int) -> list[Item]:
        """The items of the indices [start, end)."""
        found: list[Item] = []
        places = enumerate(self._places[start:end].tolist(), start)
        for after, run in itertools.groupby(places, lambda pair: pair[1] - pair[0] if pair[1] >= 0 else None):
            indices = [index for index, _ in run]
            items: Iterable[Item] = map(_GoneItem, indices)
            if after is not None:
                items = self._source.items(indices[0] + after, indices[-1] + after + 1)
            found += [replace(item, index=index) for item, index in zip(items, indices, strict=True)]  # type: ignore[type-var]
        return found


Items = SourceList | Numbered
"""The images of a store by their indices in it."""


def numbered(root: Path, schema: StoreSchema, source: SourceList) -> Items:
    """The items of `source` by their indices in the store. Raises UserError if a listing of them is lost."""
    if not schema.changes:
        return source
    places, first = np.full(schema.count, -1), 0
    for number, inner in enumerate(source.sources):
        before = read_listing(root, schema, number)
        if before is None or sum(len(indices) for _, indices in before) != len(inner):
            raise UserError(
                f"data.features: {listing_path(root, schema, number)} names the images of missing parts, and is "
                f"missing or damaged; choose another data.features, or delete {root}, then {EXTRACT}"
            )
        places[indices_of(before)] = np.arange(first, first + len(inner))
        first += len(inner)
    return Numbered(source, places)


def _check_sources(root: Path, found: StoreSchema, requested: StoreSchema) -> None:
    """Raise UserError if the run has other settings or sources than the store, or fewer sources."""
    check_same(root, found.requested(requested.sources), as_read(requested))
    for there, here in zip(found.current, requested.sources, strict=False):
        if there.keys() != here.keys() or any(there[key] != here[key] for key in there if key not in _FILES):
            check_same(root, found.requested(), as_read(requested))
    if len(found.current) > len(requested.sources):
        check_same(root, found.requested(), as_read(requested))


_FILES = "count", "digest"  # the keys that change with the files of a source


def _changes(
    root: Path, found: StoreSchema, requested: StoreSchema, number: int, inner: Source, by_content: bool
) -> _Changes:
    """What changed in one source since its listing. Raises UserError if only its settings changed."""
    same, agrees = (
        requested.sources[number] == found.current[number],
        is_current(listing_path(root, found, number), inner),
    )
    if agrees and not same:
        check_same(root, found.requested(), as_read(requested))
    live = live_indices(found, number)
    if agrees and not by_content and not found.changes:
        return _Changes(live, listed=True)
    before = read_listing(root, found, number)
    if agrees and not by_content and before is not None:
        return _Changes(indices_of(before), listed=True)
    if before is None:
        # Before the first change, files with the same names and sizes are in the same order.
        unlisted = (replace(entry, times="", name=entry.name) for entry in inner.entries())
        before = list(with_indices(unlisted, live)) if same and len(live) == len(inner) and not found.changes else []
        lost = np.setdiff1d(live, indices_of(before))
        before.append((Entry("an image that is not listed", len(lost), "", "", ""), lost))
    return _compared(root, found, inner, before, by_content)


def _compared(
    root: Path, found: StoreSchema, inner: Source, before: list[tuple[Entry, Ints]], by_content: bool
) -> _Changes:
    """As `_changes`. Compares names, sizes and times, and the content where they differ."""
    absent = np.zeros(found.count, bool)
    for start, end in missing(root, found.ranges()):
        absent[start:end] = True
    changes, paired = _Changes(np.full(len(inner), -1)), dict[int, int]()
    left, other_counts = dict(keyed(before)), set()
    for key, (now, here) in keyed(with_indices(inner.entries(), np.arange(len(inner)))):
        then, indices = left.get(key, (None, here))
        if then is None:
            continue
        if len(indices) != len(here):
            other_counts.add(key)
            continue
        del left[key]
        if then == now and not by_content:
            changes.places[here] = indices
            continue
        kept = absent[indices]  # these are not encoded yet, so their index stays
        changes.places[here[kept]] = indices[kept]
        paired |= zip(here[~kept].tolist(), indices[~kept].tolist(), strict=True)
        changes.names |= dict.fromkeys(indices[~kept].tolist(), now.name)
    for key, (entry, indices) in left.items():
        name = f"parts of {entry.name}" if key in other_counts else entry.name  # its crops, mirror images or clips
        changes.names |= dict.fromkeys(indices.tolist(), name)
    changes.gone = dict.fromkeys(changes.names)
    known, skipped = _contents(root, found, [index for index in changes.gone if not absent[index]])
    if known:
        changes.digests = _digests(inner, changes.new)
    _keep_unchanged(inner, changes, paired, known, skipped)
    _find_replacements(changes, paired, known, skipped)
    return changes


def _keep_unchanged(
    inner: Source, changes: _Changes, paired: dict[int, int], known: dict[int, Digests], skipped: dict[int, str]
) -> None:
    """Give images whose content is in the store their index, first to those of the same name. `skipped`: the names of
    unusable ones, which keep their index only by that name: the store's report has it."""
    for image, index in paired.items():
        if known[index] == changes.digests[image]:
            changes.places[image] = index
            del changes.gone[index]
    waiting: dict[tuple[Digests, str], deque[int]] = defaultdict(deque)
    for index in sorted(known.keys() & changes.gone.keys()):
        waiting[known[index], skipped.get(index, "")].append(index)
    named = {digests for digests, name in waiting if name}
    for image in changes.new if waiting else ():
        digests = changes.digests[image]
        indices = waiting[digests, ""] or (digests in named and waiting[digests, _name(inner, image)])
        if indices:
            changes.places[image] = index = indices.popleft()
            del changes.gone[index]


_UNREADABLE: Digests = (0, 0)


def _find_replacements(
    changes: _Changes, paired: dict[int, int], known: dict[int, Digests], skipped: dict[int, str]
) -> None:
    """Find what replaces indices that are gone: the image of the same name, or the same image."""
    images: dict[int, deque[int]] = defaultdict(deque)
    by_name = {index: image for image, index in paired.items() if changes.places[image] < 0}
    for gone in sorted(changes.gone):
        if gone in by_name:
            changes.gone[gone] = by_name[gone]
        elif gone in known and gone not in skipped:
            images[known[gone][0]].append(gone)
    for image in changes.new:
        found, index = changes.digests.get(image, _UNREADABLE), paired.get(image)
        if index is None and images[found[0]]:
            index = images[found[0]].popleft()
            changes.gone[index] = image
        if index is not None:
            changes.edited.append((image, known[index][0] == found[0]))


def _contents(root: Path, found: StoreSchema, indices: Sequence[int]) -> tuple[dict[int, Digests], dict[int, str]]:
    """The digests of images in the store, from their parts, and the names of skipped ones. Raises UserError if a
    part is damaged."""
    wanted = np.array(sorted(indices), np.int64)
    cuts = [(each, wanted[slice(*np.searchsorted(wanted, each))]) for each in found.ranges()]
    skipped = dict[int, str]()

    def read(cut: tuple[Range, Ints]) -> Iterator[tuple[int, Digests]]:
        each, here = cut
        part = Part.open(part_path(root, *each), identity=part_identity(found, each[0]))
        skipped.update((item.index, item.name) for item in part.header.skipped())
        return zip(here.tolist(), map(tuple, part.content[here - each[0]].tolist()), strict=True)

    with ThreadPoolExecutor(_READERS, "parts") as threads:
        known = threads.map(read, [cut for cut in cuts if len(cut[1])])
        return dict(itertools.chain.from_iterable(known)), skipped


def _digests(inner: Source, images: Sequence[int]) -> dict[int, Digests]:
    """The digests of some images of a source. Raises UserError if one cannot be read."""
    chunks = [images[at : at + _CHUNK] for at in range(0, len(images), _CHUNK)]
    found: dict[int, Digests] = {}

    def read(numbers: Sequence[int]) -> dict[int, Digests]:
        return {item.index: _digests_of(item) for item in _items(inner, numbers)}

    with ThreadPoolExecutor(_READERS, "compare") as threads, log.progress("compare", len(images), "files") as advance:
        for some in threads.map(read, chunks):
            found |= some
            advance(len(some))
    return found


def _digests_of(item: Item) -> Digests:
    try:
        return item.read().digests()
    except Unusable:
        return _UNREADABLE


def _items(inner: Source, images: Sequence[int]) -> Iterator[Item]:
    """Some items of a source, in as few reads as possible."""
    for _, group in itertools.groupby(enumerate(images), lambda pair: pair[1] - pair[0]):
        numbers = [image for _, image in group]
        yield from inner.items(numbers[0], numbers[-1] + 1)


def _digest_of_new(inner: Source, changes: _Changes) -> str:
    """A digest of the new images: of their names, their entries, and the content of edited ones."""
    listed = [(entry, len(indices)) for entry, indices in with_indices(inner.entries(), np.arange(len(inner)))]
    ends = np.cumsum([count for _, count in listed])
    taken = set(changes.gone.values())
    digest = xxhash.xxh3_128()
    for item in _items(inner, changes.new):
        entry = listed[int(np.searchsorted(ends, item.index, "right"))][0]
        content = changes.digests[item.index] if item.index in taken else None
        digest.update(json.dumps([item.name, entry.image, entry.captions, content]).encode())
    return digest.hexdigest()


def _runs(gone: dict[int, int]) -> list[Run]:
    """Runs [start, end, by] of indices that are gone. `by`: the index that replaces the first, −1 for none."""
    runs: list[Run] = []
    for index, by in sorted(gone.items()):
        start, end, first = runs[-1] if runs else (-1, -1, -1)
        if index == end and by == (first if first < 0 else first + end - start):
            runs[-1] = start, end + 1, first
        else:
            runs.append((index, index + 1, by))
    return runs


def _summary(inner: Source, changes: _Changes) -> str:
    """`2 added: x.png, y.png; 1 removed: b.png; 1 edited: the caption of a.png`."""
    taken = {by for by in changes.gone.values() if by is not None}
    new = [image for image in changes.new if image not in taken]
    added = [_name(inner, image) for image in new[:_NAMED]]
    removed = [changes.names[index] for index, by in changes.gone.items() if by is None]
    edited = [
        f"the caption of {_name(inner, image)}" if alone else _name(inner, image)
        for image, alone in changes.edited[:_NAMED]
    ]
    kinds = (
        ("added", len(new), added),
        ("removed", len(removed), sorted({*removed})),
        ("edited", len(changes.edited), edited),
    )
    return "; ".join(f"{count} {what}: {_first_names(names, count)}" for what, count, names in kinds if count)


def _first_names(names: Sequence[str], count: int) -> str:
    return shown(", ".join(names[:_NAMED])).replace("\n", "\\n") + (", …" if count > _NAMED else "")


def _name(inner: Source, image: int) -> str:
    return inner.items(image, image + 1)[0].name
