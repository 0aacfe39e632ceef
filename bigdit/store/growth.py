"""How a store grows: the schema after the changes waits in `growth.json` until all its parts are there.

So a store is as it was before, or as it is after, whenever it is read. Parts are only added.
"""

from __future__ import annotations

import os
from pathlib import Path

from bigdit.errors import UserError
from bigdit.files import MOST_BYTES, create_text, write_text
from bigdit.store.header import check_part, read_header
from bigdit.store.lease import all_leases, own_folder
from bigdit.store.part import part_range
from bigdit.store.schema import FILE, GROWTH, StoreSchema, check_same, part_identity, read_schema, schema_text


def begin_growth(root: Path, found: StoreSchema, grown: StoreSchema) -> None:
    """Let extractions complete `grown`, which follows `found`; both as read from a file.

    Parts of other changes, which were not completed, are removed. Raises UserError while they are encoded.
    """
    pending = read_schema(root, GROWTH)
    if pending == grown != found:
        return
    if pending not in (None, found):
        _check_idle(root)
    text = schema_text(grown)
    if len(text) > MOST_BYTES:
        raise UserError(
            f"data.features: the removed images of {root} are too many for its schema; choose another data.features"
        )
    _forget(root, found, grown)
    if grown != found:
        with own_folder(root) as workspace:
            create_text(root / GROWTH, text, workspace)
        check_same(root, read_schema(root, GROWTH) or read_schema(root), grown)


def commit_growth(root: Path, grown: StoreSchema) -> None:
    """Make `grown`, whose parts are all there, the schema of the store. Several processes may do so."""
    if read_schema(root) != grown:
        with own_folder(root) as workspace:
            write_text(root / FILE, schema_text(grown), workspace)
    (root / GROWTH).unlink(missing_ok=True)


def _check_idle(root: Path) -> None:
    if busy := [lease for lease in all_leases(root) if lease.fate != "dead"]:
        raise UserError(
            f"data.features: {busy[0].worker} encodes other changes into {root}; wait until it ends, or, if it was "
            f"killed on another machine, run `bigdit features clean --other-machines {root}`"
        )


def _forget(root: Path, found: StoreSchema, grown: StoreSchema) -> None:
    """Remove an incomplete growth of `found`, and its parts that are not those of `grown`."""
    (root / GROWTH).unlink(missing_ok=True)
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
