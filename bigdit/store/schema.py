"""The schema of a store in `schema.json`: encoders, buckets, sources, parts and classes."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError, model_validator

from bigdit.catalog.families import Editor, editor_of
from bigdit.documents import differences, read_json
from bigdit.errors import UserError, nearest
from bigdit.files import create_text
from bigdit.sources.protocol import Sample, Unusable
from bigdit.store.lease import own_folder
from bigdit.store.tensors import lines_digest
from bigdit.strategy import Strict

Known = list[str] | int
"""The names of classes 0, 1, …; or the number of classes, if labels are numbers."""


class Classes:
    """Turns labels into numbers of classes."""

    def __init__(self, known: Known) -> None:
        self._numbers = {} if isinstance(known, int) else {name: number for number, name in enumerate(known)}
        self.count = known if isinstance(known, int) else len(known)

    def number(self, label: str | int) -> int:
        """The class with a label's name or number. Raises UserError if there is none."""
        if isinstance(label, str) and label in self._numbers:
            return self._numbers[label]
        number = _whole(label)
        if number is not None and 0 <= number < self.count:
            return number
        numbers = f"0 to {self.count - 1}"
        known = f"known: {numbers}"
        if self._numbers:
            known = f"{nearest(str(label), self._numbers)} (or numbers, {numbers})"
        raise UserError(f"there is no class {str(label)[:40]!r}; {known}")

    def of(self, sample: Sample) -> int:
        """The class of a sample with a label. Raises Unusable if there is none."""
        assert sample.label is not None
        try:
            return self.number(sample.label)
        except UserError as error:
            raise Unusable(str(error)) from None


def _whole(label: str | int) -> int | None:
    if isinstance(label, int):
        return label
    return int(label) if label.isascii() and label.isdecimal() and len(label) < 19 else None


FILE = "schema.json"
GROWTH = re.compile(r"growth-(\d{6})\.json")
"""The names of schemas that wait for parts of a store that grows (`changes.py`)."""
EXTRACT = "`bigdit extract --config RUN.yaml`"  # for errors: the command that makes and completes stores

VERSION: Final = 5

_CHECKSUM = "checksum"

MOST_PARTS = 10_000_000
"""The most files in one folder. A damaged count must not take all memory."""

Range = tuple[int, int]
"""Indices [start, end) in the list of sources."""

Run = tuple[int, int, int]
"""A run of `Change.gone`."""


class Change(Strict):
    """One growth of a store. `sources`: the identities of all sources after it. `gone`: the images that it removed.

    A run [start, end, by] of `gone` has the indices of images. The images from index `by` on replaced them; −1: none.
    """

    sources: list[dict[str, Any]]
    gone: list[tuple[int, int, int]]


_BUCKETS = TypeAdapter(list[list[tuple[int, ...]]])


class StoreSchema(Strict):
    """The contents of a store: encoders, buckets in pixels, sources of `source["count"]` images each, parts.

    `classes`: their names or their number; None if images have captions. `fps`: the frame rate of videos.
    `first_frame`: the columns of first frames and their image encoder. `references`: how many images come before an
    edit; `min_references`: the fewest, if numbers differ. `fill`: channels of masked images and their masks. Parts
    never change. Images that are added to source n later have their own entry in `sources`, with `of` n. `changes` say
    which images are no longer used.
    """

    version: Literal[5] = VERSION
    codec: dict[str, Any]
    text_encoder: dict[str, Any]
    buckets: list[tuple[int, ...]]
    sources: list[dict[str, Any]]
    part_size: PositiveInt
    classes: Known | None = None
    fps: float | None = None
    first_frame: dict[str, Any] | None = None
    references: NonNegativeInt = 0
    min_references: NonNegativeInt | None = None
    fill: NonNegativeInt = 0
    changes: list[Change] = []

    @model_validator(mode="after")
    def _sound(self) -> StoreSchema:
        """Check the types of the encoders' descriptions."""
        text, first = self.text_encoder, self.first_frame or {}
        streams, parts = text.get("streams", {}), text.get("components", {})
        for group in (streams, parts):
            if not isinstance(group, dict) or not all(isinstance(each, dict) for each in group.values()):
                raise ValueError("text_encoder describes no encoder")
        sizes = [text.get("max_tokens")] if text else []
        sizes += [each.get(key) for each in streams.values() for key in ("max_tokens", "dim")]
        sizes += [first.get(key) for key in ("tokens", "dim")] if "dim" in first else []
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("a size in an encoder's description is no number")
        _BUCKETS.validate_python([source.get("buckets", []) for source in self.current])
        return self

    @property
    def editor(self) -> Editor:
        """How the pipeline that encoded the captions edits images."""
        return editor_of(self.text_encoder.get("class_name"))

    @property
    def count(self) -> int:
        """The images of all sources."""
        return sum(int(source["count"]) for source in self.sources)

    @property
    def streams(self) -> dict[str, dict[str, int]]:
        """`max_tokens` and `dim` of each further text encoder's states, by name."""
        found: dict[str, dict[str, int]] = self.text_encoder.get("streams", {})
        return found

    @property
    def current(self) -> list[dict[str, Any]]:
        """The identities of a run's sources when they were last encoded."""
        return self.changes[-1].sources if self.changes else self.sources

    @property
    def all_buckets(self) -> list[tuple[int, ...]]:
        """The buckets that samples can have, each once. Sources without their own have those of the store."""
        own = [source.get("buckets", self.buckets) for source in self.current]
        return list(dict.fromkeys(tuple(bucket) for buckets in own for bucket in buckets))

    @property
    def owners(self) -> list[int]:
        """The number of the run's source for each of `sources`."""
        first = itertools.count()
        return [source["of"] if "of" in source else next(first) for source in self.sources]

    def requested(self, sources: list[dict[str, Any]] | None = None) -> StoreSchema:
        """The schema that a run with this store asks for, with these `sources` (None: the current ones)."""
        return self.model_copy(update={"sources": self.current if sources is None else sources, "changes": []})

    def gone(self, changes: int | None = None) -> list[Run]:
        """The runs that the first `changes` removed; None: all changes."""
        return [run for change in self.changes[:changes] for run in change.gone]

    @property
    def has_masks(self) -> bool:
        """Whether images of a source may have masks of the loss."""
        return not self.fill and any("masks" in source for source in self.sources)

    def ranges(self) -> list[Range]:
        """The ranges of the parts, in order. No part spans two sources, so an appended source changes no other part."""
        ends = self.ends()
        return [
            (start, min(start + self.part_size, end))
            for first, end in zip([0, *ends], ends, strict=False)
            for start in range(first, end, self.part_size)
        ]

    def ends(self) -> list[int]:
        """The index after the last image of each source."""
        return list(itertools.accumulate(int(source["count"]) for source in self.sources))


def store_identity(schema: StoreSchema) -> str:
    """A digest of version, encoders, buckets and classes. All parts of a store share it, also when the store grows."""
    newer = {name for name in ("references", "fill") if not getattr(schema, name)}  # older stores have none
    newer |= {"min_references"} if schema.min_references is None else set()
    return _digest(schema.model_dump(mode="json", exclude={"sources", "part_size", "changes"} | newer))


def part_identity(schema: StoreSchema, start: int) -> str:
    """A digest that the parts of one source share. `start`: the first index of a part.

    It is the same on all machines that extract the same images, and stays the same when sources are appended.
    """
    ends = schema.ends()
    number = bisect.bisect_right(ends, start)
    return _digest([store_identity(schema), schema.sources[number], ends[number - 1] if number else 0])


def schema_text(schema: StoreSchema) -> str:
    """The text of `schema.json`: indented JSON, with a checksum."""
    plain = schema.model_dump(mode="json")
    return json.dumps(plain | {_CHECKSUM: _digest(plain)}, indent=2) + "\n"


def read_schema(root: Path, name: str = FILE) -> StoreSchema | None:
    """The schema of the store at `root`, None if there is none. Raises UserError if it is damaged."""
    file = root / name
    try:
        plain = read_json(file)
        version = plain.get("version")
        known = plain.pop(_CHECKSUM, None)
        if version != VERSION and known == _digest(plain):
            raise UserError(
                f"data.features: {file} has version {str(version)[:20]}, expected {VERSION}; choose another "
                f"data.features, or delete {root}, then {EXTRACT}"
            )
        schema = StoreSchema.model_validate(plain)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"data.features: {file} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError) as error:
        why = "its keys are wrong" if isinstance(error, ValidationError | AttributeError) else str(error)
        raise _damaged(file, why) from None
    if schema.classes is None and not schema.text_encoder:
        raise _damaged(file, "it has neither captions nor classes")
    if known != _digest(plain) or not all(type(source.get("count")) is int for source in schema.sources):
        raise _damaged(file, "its checksum is wrong")
    if not _sound_changes(schema):
        raise _damaged(file, "its changes are not of its images")
    if schema.count > MOST_PARTS * schema.part_size:
        raise UserError(
            f"data.features: {root / FILE} has {schema.count} images in parts of {schema.part_size}: more than "
            f"{MOST_PARTS} files; raise data.part_size, and choose another data.features"
        )
    return schema


def _sound_changes(schema: StoreSchema) -> bool:
    """Whether all that sources and changes refer to exists."""
    count, first = schema.count, sum("of" not in source for source in schema.sources)
    owned = (source["of"] for source in schema.sources if "of" in source)
    counts = (source.get("count") for change in schema.changes for source in change.sources)
    return (
        (bool(schema.changes) or first == len(schema.sources))
        and all(type(number) is int and 0 <= number < first for number in owned)
        and all(type(each) is int for each in counts)
        and all(len(change.sources) <= first for change in schema.changes)
        and all(0 <= start < end <= count and -1 <= by <= count - (end - start) for start, end, by in schema.gone())
    )


def claim(root: Path, schema: StoreSchema) -> None:
    """Make `root` the store of `schema`, or resume it.

    Raises UserError, with the keys that differ, if it is another store, and if it cannot be written.
    """
    schema = as_read(schema)
    with own_folder(root) as workspace:
        if read_schema(root) is None:
            create_text(root / FILE, schema_text(schema), workspace)  # unless another extraction was faster
    check_same(root, read_schema(root), schema)


def as_read(schema: StoreSchema) -> StoreSchema:
    """The schema as it is read from its file: tuples become lists."""
    return StoreSchema.model_validate_json(schema.model_dump_json())


def check_same(root: Path, found: StoreSchema | None, requested: StoreSchema) -> None:
    """Raise UserError, which names the keys that differ, if the schema `found` at `root` is not the `requested` one."""
    there = found.model_dump(mode="json") if found else {}
    different = list(differences(there, requested.model_dump(mode="json")))
    if different:
        lines = [line for each in different for line in _difference(*each)]
        raise UserError(
            f"data.features: {root} was encoded with other settings: {'; '.join(lines)}; "
            f"choose another data.features, or delete this folder"
        )


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"data.features: {file} is damaged: {why}; delete it, then {EXTRACT} makes it again")


def _digest(value: Any) -> str:
    return lines_digest([json.dumps(value, sort_keys=True).encode()])


def _difference(name: str, found: Any, requested: Any) -> list[str]:
    """Messages for a key that differs, with both values."""
    if isinstance(found, list) and isinstance(requested, list) and name == "classes":
        pairs = enumerate(itertools.zip_longest(found, requested))
        first = ((at, here, there) for at, (here, there) in pairs if here != there)
        return [f"{name}[{at}] is {here!r} there and {there!r} in this run" for at, here, there in first][:1]
    if isinstance(found, list) and isinstance(requested, list) and name == "sources":
        return _other_sources(found, requested)
    return [f"{name} is {found} there and {requested} in this run"]


def _other_sources(found: list[dict[str, Any]], requested: list[dict[str, Any]]) -> list[str]:
    """Messages on how the sources of a store differ from those of a run, without digests."""
    if len(found) > len(requested):
        return [f"it has {len(found)} sources, and data.images of this run has {len(requested)}"]
    lines = []
    for at, (there, here) in enumerate(zip(found, requested, strict=False)):
        of = [f"{source.get('kind')} of {source['count']}" for source in (there, here)]
        if of[0] != of[1]:
            lines.append(f"data.images[{at}] was a {of[0]}, and is a {of[1]} in this run")
        elif there != here:
            lines.append(f"data.images[{at}] has other files now, or other settings")
    extra = len(requested) - len(found)
    return [*lines, f"{extra} more in data.images"] if extra and not lines else lines
