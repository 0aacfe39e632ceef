"""What a store holds and how it was made: `schema.json`, which every extraction and every reader agrees on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt, ValidationError

from bigdit.errors import UserError
from bigdit.features.in_hand import own_folder
from bigdit.files import create_text, write_text
from bigdit.spec import Strict

FILE = "schema.json"
EXTRACT = "`bigdit extract --config RUN.yaml`"  # how errors name the command that makes and finishes stores

MOST_PARTS = 10_000_000
"""In one folder. A damaged count must not ask for more memory than there is."""

Range = tuple[int, int]
"""Indices [start, end) of the sources, one after another."""


class StoreSchema(Strict):
    """The identity of a store: encoders, buckets in pixels, sources of `source["count"]` pictures each, its parts."""

    version: Literal[2] = 2
    codec: dict[str, Any]
    text_encoder: dict[str, Any]
    buckets: list[tuple[int, int]]
    sources: list[dict[str, Any]]
    part_size: PositiveInt

    @property
    def count(self) -> int:
        """Pictures of all sources."""
        return sum(int(source["count"]) for source in self.sources)

    def ranges(self) -> list[Range]:
        """The ranges of the parts, in order. None spans two sources: what is appended leaves those before it alone."""
        ends = list(itertools.accumulate(int(source["count"]) for source in self.sources))
        return [
            (start, min(start + self.part_size, end))
            for first, end in zip([0, *ends], ends, strict=False)
            for start in range(first, end, self.part_size)
        ]


def read_schema(root: Path) -> StoreSchema | None:
    """The schema of the store at `root`; None where there is none. Raises UserError where it is damaged."""
    try:
        schema = StoreSchema.model_validate_json((root / FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"data.features: {root / FILE} cannot be read: {error.strerror}") from None
    except ValidationError:
        schema = None
    if schema is None or not all(type(source.get("count")) is int for source in schema.sources):
        raise UserError(f"data.features: {root / FILE} is not a schema of version 2; delete {root}, then {EXTRACT}")
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
    text = schema.model_dump_json(indent=2) + "\n"
    schema = StoreSchema.model_validate_json(text)  # with lists in place of tuples, as they are read back
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
    if isinstance(found, list) and isinstance(asked, list) and name == "sources":
        pairs = enumerate(itertools.zip_longest(found, asked, fillvalue="missing"))
        return [line for at, (here, there) in pairs for line in _differences(here, there, f"{name}[{at}]")]
    return [] if found == asked else [f"{name} is {found} there, and {asked} in this run"]
