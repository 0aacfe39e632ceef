"""What has changed in a run's sources since their store was encoded: what is new or gone, and what was edited.

A listing of each source lies in the store: names, sizes and times of its files. It can be deleted at any time. Where a
time alone differs, as after a copy, the files are read, and their digests held against those in the parts.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from bigdit import log
from bigdit.errors import UserError, shown
from bigdit.extract.ranges import missing
from bigdit.files import replacing
from bigdit.sources.open import INDEX, SourceList
from bigdit.sources.protocol import Entry, Item, Source, Unusable
from bigdit.store.part import part_path
from bigdit.store.reader import Part
from bigdit.store.schema import EXTRACT, Range, StoreSchema, part_identity, read_schema

_NAMED = 3  # of each kind of change
_ENTRY = TypeAdapter(tuple[str, int, str, str, str], config={"strict": True})
_DAMAGED = OSError, EOFError, ValueError, zlib.error
_READERS = 8  # parts whose files are read side by side


@dataclass
class _Changes:
    """Names of what was added, removed and edited; `touched`: ranges of items that may have been edited as well."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    touched: list[Range] = field(default_factory=list)


def check_unchanged(root: Path, schema: StoreSchema, source: SourceList) -> None:
    """Raise UserError, which names what changed, where the store at `root` was encoded from other files than those that
    the sources of `schema` have now. Parts that are not encoded yet may be of any."""
    found = read_schema(root)
    if found is None or _without_sources(found) != _without_sources(schema):
        return  # claiming it says what differs
    pairs = list(zip(found.sources, schema.sources, strict=False))
    same, first, problems = all(before == now for before, now in pairs), 0, list[str]()
    for number, (before, now) in enumerate(pairs):
        inner = source.sources[number]
        changes = _compared(_listing(root, number), inner)
        if same:
            touched = [(first + start, first + end) for start, end in changes.touched]
            changes = _Changes(edited=_edited(root, found, source, touched))
        if (same or before != now) and (changes.added or changes.removed or changes.edited):
            problems.append(_told(root, number, changes))
        first += len(inner)
    if problems:
        raise UserError(*problems)


def _without_sources(schema: StoreSchema) -> StoreSchema:
    """A schema without its sources, as it is read back."""
    return StoreSchema.model_validate_json(schema.model_copy(update={"sources": []}).model_dump_json())


def write_listings(root: Path, source: SourceList) -> None:
    """Keep what the sources consist of now, where that is not what is kept."""
    for number, inner in enumerate(source.sources):
        path = _listing(root, number)
        if not _is_listed(path, inner):
            with replacing(path) as temporary, gzip.open(temporary, "wt", compresslevel=1) as file:
                file.writelines(map(_line, inner.entries()))


def _listing(root: Path, number: int) -> Path:
    return root / INDEX / f"source-{number}.jsonl.gz"


def _line(entry: Entry) -> str:
    return json.dumps(astuple(entry)) + "\n"


def _is_listed(path: Path, source: Source) -> bool:
    with contextlib.suppress(*_DAMAGED), gzip.open(path, "rt") as file:
        return all(before == now for before, now in itertools.zip_longest(file, map(_line, source.entries())))
    return False


def _listed(path: Path) -> list[Entry]:
    """The entries of a listing; none where there is none, or it is damaged."""
    with contextlib.suppress(*_DAMAGED), gzip.open(path, "rt") as file:
        return [Entry(*_ENTRY.validate_json(line)) for line in file]
    return []


def _compared(path: Path, source: Source) -> _Changes:
    """A source beside its listing; all of it is touched where there is none."""
    if _is_listed(path, source):
        return _Changes()
    before = dict(_numbered(_listed(path)))
    if not before:
        return _Changes(touched=[(0, len(source))])
    changes, end = _Changes(), 0
    for key, now in _numbered(source.entries()):
        start, end = end, end + now.count
        then = before.pop(key, None)
        if then is None:
            changes.added.append(now.name)
        elif replace(then, times=now.times) != now:
            captions_alone = (then.count, then.picture) == (now.count, now.picture)
            changes.edited.append(f"the caption of {now.name}" if captions_alone else now.name)
        elif then != now:
            changes.touched.append((start, end))
    changes.removed = [name for name, _ in before]
    return changes


def _numbered(entries: Iterable[Entry]) -> Iterator[tuple[tuple[str, int], Entry]]:
    """Entries by their names; files of several folders may have one in common."""
    seen: Counter[str] = Counter()
    for entry in entries:
        yield (entry.name, seen[entry.name]), entry
        seen[entry.name] += 1


def _edited(root: Path, schema: StoreSchema, source: SourceList, touched: Sequence[Range]) -> list[str]:
    """Which of the items in ranges are not those that parts were encoded from. Raises UserError where one cannot be
    read, or a part is damaged."""
    ranges = schema.ranges()
    absent = set(missing(root, ranges))
    asked: dict[Range, list[int]] = {}
    parts = iter([each for each in ranges if each not in absent])
    part = next(parts, None)
    for index in itertools.chain.from_iterable(itertools.starmap(range, touched)):
        while part is not None and part[1] <= index:
            part = next(parts, None)
        if part is not None and part[0] <= index:
            asked.setdefault(part, []).append(index)
    if not asked:
        return []

    def edited(each: Range) -> list[str]:
        content = Part.open(part_path(root, *each), identity=part_identity(schema, each[0])).content
        items = source.items(*each)
        names = (_edit(items[index - each[0]], content[index - each[0]].tolist()) for index in asked[each])
        return [name for name in names if name is not None]

    found: list[str] = []
    with ThreadPoolExecutor(_READERS, "compare") as threads, log.progress("compare", len(asked), "parts") as advance:
        for names in threads.map(edited, asked):
            found += names
            advance(1)
    return found


def _edit(item: Item, known: list[int]) -> str | None:
    """What of an item is not as its digests say."""
    try:
        picture, captions = item.read().digests()
    except Unusable:
        picture, captions = 0, 0
    if [picture, captions] == known:
        return None
    return item.name if picture != known[0] else f"the caption of {item.name}"


def _told(root: Path, number: int, changes: _Changes) -> str:
    """One line of what changed, and what can be done."""
    kinds = (("added", changes.added), ("removed", changes.removed), ("edited", changes.edited))
    said = "; ".join(f"{len(names)} {what}: {_first(names)}" for what, names in kinds if names)
    anew = f"to encode all again, set another data.features, or delete {root}; then {EXTRACT}"
    line = f"data.features: {root} was encoded before data.images[{number}] changed: {said}; "
    if changes.removed or changes.edited:
        return line + anew
    return f"{line}to encode these alone, move them to a folder of their own, and append it to data.images; {anew}"


def _first(names: Sequence[str]) -> str:
    return shown(", ".join(names[:_NAMED])).replace("\n", "\\n") + (", …" if len(names) > _NAMED else "")
