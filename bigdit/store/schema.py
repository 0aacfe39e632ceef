"""Class labels as a store has them: numbers from 0 on, by the names that sources give them."""

from __future__ import annotations

import bisect
import itertools
import json
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import PositiveInt, ValidationError, model_validator

from bigdit.documents import read_json
from bigdit.errors import UserError, nearest
from bigdit.files import create_text, write_text
from bigdit.store.lease import own_folder
from bigdit.store.tensors import lines_digest
from bigdit.strategy import Strict

Known = list[str] | int
"""The names of classes 0, 1, …; or how many there are, where labels are the numbers themselves."""


class Classes:
    """The numbers of classes by their names."""

    def __init__(self, known: Known) -> None:
        self._numbers = {} if isinstance(known, int) else {name: number for number, name in enumerate(known)}
        self.count = known if isinstance(known, int) else len(known)

    def number(self, label: str | int) -> int:
        """The class of a label: of that name, or of that number. Raises UserError where there is none."""
        if isinstance(label, str) and label in self._numbers:
            return self._numbers[label]
        number = _whole(label)
        if number is not None and 0 <= number < self.count:
            return number
        numbers = f"0 to {self.count - 1}"
        known = f"known: {numbers}"
        if self._numbers:
            known = f"{nearest(str(label), self._numbers)} (their numbers, {numbers}, go too)"
        raise UserError(f"there is no class {str(label)[:40]!r}; {known}")


def _whole(label: str | int) -> int | None:
    if isinstance(label, int):
        return label
    return int(label) if label.isascii() and label.isdecimal() and len(label) < 19 else None


FILE = "schema.json"
EXTRACT = "`bigdit extract --config RUN.yaml`"  # how errors name the command that makes and finishes stores

VERSION: Final = 4

_CHECKSUM = "checksum"

MOST_PARTS = 10_000_000
"""In one folder. A damaged count must not ask for more memory than there is."""

Range = tuple[int, int]
"""Indices [start, end) of the sources, one after another."""


class StoreSchema(Strict):
    """What a store is: encoders, buckets in pixels, sources of `source["count"]` pictures each, its parts; `classes`:
    the names of those that pictures are of, or their number, None where pictures have captions; `fps`: the frames a
    second of videos, None where there are none; `first_frame`: what is kept of their first frames, and by which image
    encoder, None where nothing is."""

    version: Literal[4] = VERSION
    codec: dict[str, Any]
    text_encoder: dict[str, Any]
    buckets: list[tuple[int, ...]]
    sources: list[dict[str, Any]]
    part_size: PositiveInt
    classes: Known | None = None
    fps: float | None = None
    first_frame: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _sound(self) -> StoreSchema:
        """What is read of the encoders' descriptions has the types that readers expect."""
        text, first = self.text_encoder, self.first_frame or {}
        streams, parts = text.get("streams", {}), text.get("components", {})
        for group in (streams, parts):
            if not isinstance(group, dict) or not all(isinstance(each, dict) for each in group.values()):
                raise ValueError("text_encoder describes no encoder")
        sizes = [text.get("max_tokens")] if text else []
        sizes += [each.get(key) for each in streams.values() for key in ("max_tokens", "dim")]
        sizes += [first.get(key) for key in ("tokens", "dim")] if "dim" in first else []
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("a size of what an encoder gives is no number")
        return self

    @property
    def count(self) -> int:
        """Pictures of all sources."""
        return sum(int(source["count"]) for source in self.sources)

    @property
    def streams(self) -> dict[str, dict[str, int]]:
        """Of each stream of text beside the text itself `max_tokens` and `dim` of its states."""
        found: dict[str, dict[str, int]] = self.text_encoder.get("streams", {})
        return found

    def ranges(self) -> list[Range]:
        """The ranges of the parts, in order. None spans two sources: what is appended leaves those before it alone."""
        ends = self.ends()
        return [
            (start, min(start + self.part_size, end))
            for first, end in zip([0, *ends], ends, strict=False)
            for start in range(first, end, self.part_size)
        ]

    def ends(self) -> list[int]:
        """The index after the last picture of each source."""
        return list(itertools.accumulate(int(source["count"]) for source in self.sources))


def store_identity(schema: StoreSchema) -> str:
    """What all parts of one store have in common, however it is extended: its version, and the encoders, buckets,
    classes and frame rate that made them."""
    beside = [value for value in (schema.classes, schema.fps, schema.first_frame) if value is not None]
    return _digest([schema.version, schema.codec, schema.text_encoder, schema.buckets, *beside])


def part_identity(schema: StoreSchema, start: int) -> str:
    """What the part that begins at `start` has in common with those of its source alone: its pictures as well.

    Any machine that extracts the same pictures finds the same, and sources that are appended leave it as it is.
    """
    ends = schema.ends()
    number = bisect.bisect_right(ends, start)
    return _digest([store_identity(schema), schema.sources[number], ends[number - 1] if number else 0])


def schema_text(schema: StoreSchema) -> str:
    """What `schema.json` holds: JSON for people, with a checksum of what it says."""
    optional = ("classes", "fps", "first_frame")  # which stores of pictures never had
    without = {key for key in optional if getattr(schema, key) is None}
    plain = schema.model_dump(mode="json", exclude=without)
    return json.dumps(plain | {_CHECKSUM: _digest(plain)}, indent=2) + "\n"


def read_schema(root: Path) -> StoreSchema | None:
    """The schema of the store at `root`; None where there is none. Raises UserError where it is damaged."""
    file = root / FILE
    try:
        plain = read_json(file)
        version = plain.get("version")
        known = plain.pop(_CHECKSUM, None)
        if type(version) is int and version < VERSION and known in (None, _digest(plain)):
            raise UserError(
                f"data.features: {file} has version {version}, and {VERSION} is read: an earlier bigdit wrote this "
                f"store; choose another data.features, or delete {root}, then {EXTRACT}"
            )
        schema = StoreSchema.model_validate(plain)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"data.features: {file} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError) as error:
        why = "its keys are others" if isinstance(error, ValidationError | AttributeError) else str(error)
        raise _damaged(file, why) from None
    if schema.classes is None and not schema.text_encoder:
        raise _damaged(file, "it has neither captions nor classes")
    if known != _digest(plain) or not all(type(source.get("count")) is int for source in schema.sources):
        raise _damaged(file, "its checksum is not its own")
    if schema.count > MOST_PARTS * schema.part_size:
        raise UserError(
            f"data.features: {root / FILE} has {schema.count} pictures in parts of {schema.part_size}: more than "
            f"{MOST_PARTS} files; raise data.part_size, and choose another data.features"
        )
    return schema


def claim(root: Path, schema: StoreSchema) -> None:
    """Make `root` the store of `schema`, go on with it, or extend it by sources appended to its list.

    Raises UserError where it is another's, naming the keys that differ, or cannot be written.
    """
    text = schema_text(schema)
    schema = StoreSchema.model_validate_json(schema.model_dump_json())  # with lists for tuples, as they are read back
    found = read_schema(root)
    with own_folder(root) as scratch:
        if found is None:
            create_text(root / FILE, text, scratch)  # unless another extraction, that began as this one, has
        elif _extends(schema, found):
            write_text(root / FILE, text, scratch)
    check_same(root, read_schema(root), schema)


def check_same(root: Path, found: StoreSchema | None, asked: StoreSchema) -> None:
    """Raise UserError where the store at `root` is not the one that is asked for, naming the keys that differ."""
    there = found.model_dump(mode="json") if found else {}
    if differences := _differences(there, asked.model_dump(mode="json")):
        raise UserError(
            f"data.features: {root} was encoded otherwise: {'; '.join(differences)}; "
            f"choose another data.features, or delete this folder"
        )


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"data.features: {file} is damaged: {why}; delete it, then {EXTRACT} makes it again")


def _digest(value: Any) -> str:
    return lines_digest([json.dumps(value, sort_keys=True).encode()])


def _extends(longer: StoreSchema, shorter: StoreSchema) -> bool:
    """Whether the one differs from the other by sources at its end alone."""
    count = len(shorter.sources)
    return len(longer.sources) > count and longer.model_copy(update={"sources": longer.sources[:count]}) == shorter


def _differences(found: Any, asked: Any, name: str = "") -> list[str]:
    """The keys whose values differ, each with both values."""
    if isinstance(found, dict) and isinstance(asked, dict):
        keys = sorted(found.keys() | asked.keys())
        dotted = f"{name}." if name else ""
        return [line for key in keys for line in _differences(found.get(key), asked.get(key), f"{dotted}{key}")]
    if isinstance(found, list) and isinstance(asked, list) and name == "classes":
        pairs = enumerate(itertools.zip_longest(found, asked))
        first = ((at, here, there) for at, (here, there) in pairs if here != there)
        return [f"{name}[{at}] is {here!r} there, and {there!r} in this run" for at, here, there in first][:1]
    if isinstance(found, list) and isinstance(asked, list) and name == "sources":
        return _other_sources(found, asked)
    return [] if found == asked else [f"{name} is {found} there, and {asked} in this run"]


def _other_sources(found: list[dict[str, Any]], asked: list[dict[str, Any]]) -> list[str]:
    """How the sources of a store differ from those of a run, without the digests that say so."""
    if len(found) > len(asked):
        return [f"it has {len(found)} sources, and data.images of this run has {len(asked)}"]
    lines = []
    for at, (there, here) in enumerate(zip(found, asked, strict=False)):
        of = [f"{source.get('kind')} of {source['count']}" for source in (there, here)]
        if of[0] != of[1]:
            lines.append(f"data.images[{at}] was a {of[0]}, and is a {of[1]} in this run")
        elif there != here:
            lines.append(f"data.images[{at}] has other files now, or is read otherwise")
    extra = len(asked) - len(found)
    return [*lines, f"{extra} more in data.images"] if extra and not lines else lines
