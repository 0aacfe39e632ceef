"""How a store grows: the schema with the changes waits in `growth-N.json` until all its parts are there.

So a store is as it was before, or as it is after, whenever it is read. Parts are only added. The last file remains, and
replaces a `schema.json` that was lost. Of two extractions that plan at once, one creates the next file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from bigdit.errors import UserError
from bigdit.files import MOST_BYTES, create_text, write_text
from bigdit.store.header import check_part, read_header
from bigdit.store.lease import own_folder
from bigdit.store.part import part_range
from bigdit.store.schema import FILE, StoreSchema, part_identity, read_schema, schema_text


def is_growth(name: str) -> bool:
    """Whether a file of a store has this name because the store grew."""
    return _number(name) > 0


def latest_schema(root: Path) -> StoreSchema | None:
    """The schema that extractions complete: of the last growth, else the store's. Raises UserError if it is damaged."""
    last = _last(root)
    return read_schema(root, _name(last)) if last else read_schema(root)


def begin_growth(root: Path, found: StoreSchema, grown: StoreSchema) -> None:
    """Let extractions complete `grown`, which follows the latest schema `found`. Raises UserError if another began."""
    if grown == found:
        return
    text, last = schema_text(grown), _last(root)
    if len(text) > MOST_BYTES:
        raise UserError(
            f"data.features: the removed images of {root} are too many for its schema; choose another data.features"
        )
    if latest_schema(root) == found:
        _remove_others(root, found, grown)
        with own_folder(root) as workspace:
            create_text(root / _name(last + 1), text, workspace)
    if latest_schema(root) != grown:
        raise UserError(f"data.features: another extraction found other changes for {root} just now; run this again")


def commit_growth(root: Path, grown: StoreSchema) -> None:
    """Make `grown`, the latest schema, whose parts are all there, the schema of the store."""
    if read_schema(root) != grown:
        with own_folder(root) as workspace:
            write_text(root / FILE, schema_text(grown), workspace)
    for number in range(1, _last(root)):
        (root / _name(number)).unlink(missing_ok=True)


def _name(number: int) -> str:
    return f"growth-{number:06d}.json"


def _number(name: str) -> int:
    found = re.fullmatch(r"growth-(\d{6})\.json", name)
    return int(found[1]) if found else 0


def _last(root: Path) -> int:
    try:
        return max(map(_number, os.listdir(root)), default=0)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _remove_others(root: Path, found: StoreSchema, grown: StoreSchema) -> None:
    """Remove parts behind those of `found` that are not of `grown`: their growth was deleted by hand."""
    wanted = set(grown.ranges())
    for name in os.listdir(root):
        of = part_range(name)
        if of is not None and of[0] >= found.count and not (of in wanted and _is_of(root / name, grown, of[0])):
            (root / name).unlink(missing_ok=True)


def _is_of(path: Path, schema: StoreSchema, start: int) -> bool:
    try:
        check_part(read_header(path), part_identity(schema, start))
    except UserError:
        return False
    return True
