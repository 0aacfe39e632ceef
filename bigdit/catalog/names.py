"""Names as people write them, resolved to the catalogue's; its JSON files, read where the package lies."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from typing import Any

from bigdit.errors import UserError, nearest


def load_json(file: str) -> dict[str, Any]:
    """A JSON document that is shipped with bigdit.catalog."""
    document: dict[str, Any] = json.loads((resources.files(__package__) / file).read_text(encoding="utf-8"))
    return document


def normalise(name: str) -> str:
    """Lower case, with `-` for spaces, underscores and slashes: `DiT-XL/2` is dit-xl-2."""
    return re.sub(r"[\s_/]+", "-", name.strip().casefold())


def resolve(kind: str, asked: str, plain: str, known: Collection[str], aliases: Mapping[str, Sequence[str]]) -> str:
    """The catalogue's name for `plain`, which is one of `known` or an alias of exactly one of them.

    Raises UserError for an alias of several (they are listed) and for a name that is unknown (the nearest
    ones are listed); `kind`, "model" or "gpu", and `asked`, as the user wrote it, are for these messages.
    """
    if plain in known:
        return plain
    targets = aliases.get(plain, ())
    if len(targets) == 1:
        return targets[0]
    if targets:
        raise UserError(f"{kind} {asked!r} is ambiguous; name one of {', '.join(targets)}")
    near = nearest(plain, [*known, *aliases])
    raise UserError(f"{kind} {asked!r} is not in the catalogue; {near} (`bigdit {kind}s` lists all)")


def aliases_of(name: str, aliases: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The aliases that mean `name` and nothing else."""
    return tuple(alias for alias, targets in aliases.items() if list(targets) == [name])
