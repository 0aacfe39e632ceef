"""What a store holds and how it was made: `schema.json`, which every extraction and every reader agrees on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from bigdit.errors import UserError
from bigdit.files import write_text
from bigdit.spec import Strict

FILE = "schema.json"
EXTRACT = "`bigdit extract --config RUN.yaml`"  # how errors name the command that makes and finishes stores


class StoreSchema(Strict):
    """The identity of a store: encoders, buckets in pixels, the source of `source["count"]` pictures, its parts."""

    version: Literal[1] = 1
    codec: dict[str, Any]
    text_encoder: dict[str, Any]
    buckets: list[tuple[int, int]]
    source: dict[str, Any]
    part_size: int

    def ranges(self) -> list[tuple[int, int]]:
        """Source ranges [start, end) of the parts, in order."""
        count = int(self.source["count"])
        return [(start, min(start + self.part_size, count)) for start in range(0, count, self.part_size)]


def read_schema(root: Path) -> StoreSchema | None:
    """The schema of the store at `root`; None where there is none. Raises UserError where it is damaged."""
    try:
        return StoreSchema.model_validate_json((root / FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"data.features: {root / FILE} cannot be read: {error.strerror}") from None
    except ValidationError:
        raise UserError(
            f"data.features: {root / FILE} is not a schema of version 1; delete {root}, then {EXTRACT}"
        ) from None


def claim(root: Path, schema: StoreSchema) -> None:
    """Make `root` the store of `schema`, or go on with it.

    Raises UserError where it is another's, naming the keys that differ, or cannot be written.
    """
    found = read_schema(root)
    if found is None:
        write_text(root / FILE, schema.model_dump_json(indent=2) + "\n")
        found = schema
    differences = _differences(found.model_dump(mode="json"), schema.model_dump(mode="json"))
    if differences:
        raise UserError(
            f"data.features: {root} was encoded otherwise: {'; '.join(differences)}; "
            f"choose another data.features, or delete this folder"
        )


def _differences(found: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> list[str]:
    """The keys whose values differ, each with both values."""
    lines = []
    for key in sorted(found.keys() | asked.keys()):
        here, there = found.get(key), asked.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            lines += _differences(here, there, f"{prefix}{key}.")
        elif here != there:
            lines.append(f"{prefix}{key} is {here} there, and {there} in this run")
    return lines
