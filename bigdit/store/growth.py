"""How a store grows: its next schema waits in `growth-N.json` until all its parts exist.

So whoever reads a store finds it as it was before, or as it is after. Parts are only added. The last growth file stays,
and replaces a lost `schema.json`. If two extractions plan at once, one of them creates the next file.
"""

from __future__ import annotations

import os
from pathlib import Path

from bigdit.errors import UserError
from bigdit.files import MOST_BYTES, create_text, write_text
from bigdit.store.header import check_part, read_header
from bigdit.store.lease import own_folder
from bigdit.store.part import part_range
from bigdit.store.schema import FILE, GROWTH, StoreSchema, part_identity, read_schema, schema_text


def latest_schema(root: Path) -> StoreSchema | None:
    """The schema that extractions complete: the last growth's, or else the store's. Raises UserError if damaged."""
    last = _last_growth(root)
    return read_schema(root, _growth(last)) if last else read_schema(root)


def begin_growth(root: Path, found: StoreSchema, grown: StoreSchema) -> None:
    """Make `grown` the latest schema after `found`, for extractions to complete.

    Raises UserError if another growth began meanwhile, or the schema is too large.
    """
    if grown == found:
        return
    text, last = schema_text(grown), _last_growth(root)
    if len(text) > MOST_BYTES:
        raise UserError(
            f"data.features: the removed images of {root} are too many for its schema; choose another data.features"
        )
    if latest_schema(root) == found:
        _remove_old_parts(root, found, grown)
        with own_folder(root) as workspace:
            create_text(root / _growth(last + 1), text, workspace)
    if latest_schema(root) != grown:
        raise UserError(f"data.features: another extraction found other changes for {root} just now; run this again")


def commit_growth(root: Path, grown: StoreSchema) -> None:
    """Make `grown`, the latest schema, the schema of the store. All its parts exist."""
    if read_schema(root) != grown:
        with own_folder(root) as workspace:
            write_text(root / FILE, schema_text(grown), workspace)
    for number in range(1, _last_growth(root)):
        (root / _growth(number)).unlink(missing_ok=True)


def _growth(number: int) -> str:
    return f"growth-{number:06d}.json"


def _last_growth(root: Path) -> int:
    """The number of the last growth file; 0 without one."""
    try:
        return max((int(found[1]) for name in os.listdir(root) if (found := GROWTH.fullmatch(name))), default=0)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _remove_old_parts(root: Path, found: StoreSchema, grown: StoreSchema) -> None:
    """Remove parts after those of `found` that do not belong to `grown`: their growth was deleted by hand."""
    ranges = set(grown.ranges())
    for name in os.listdir(root):
        here = part_range(name)
        if here is None or here[0] < found.count:
            continue
        if here not in ranges or not _belongs_to(grown, root / name, here[0]):
            (root / name).unlink(missing_ok=True)


def _belongs_to(schema: StoreSchema, path: Path, start: int) -> bool:
    try:
        check_part(read_header(path), part_identity(schema, start))
    except UserError:
        return False
    return True
