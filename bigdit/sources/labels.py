"""The class that a picture is of: a name or a number, as a folder, a column or a key of JSON has it."""

from __future__ import annotations

import json
from typing import Any

from bigdit.sources.protocol import Unusable

FOLDER = "folder"
"""What `label` is where the first folder of a picture's path is its class."""

Label = str | int
"""The name of a class, or its number."""


def folder_label(name: str) -> str:
    """The first folder of a relative path. Raises Unusable where the picture lies in none, or in one of no text."""
    first, below, _ = name.partition("/")
    if not below:
        raise Unusable("picture in no folder, whose name would be its class")
    if not first.isprintable():  # nor is what is no UTF-8
        raise Unusable("picture in a folder whose name is no text")
    return first


def json_label(data: bytes, key: str, name: str) -> Label:
    """What `key` of the JSON file `name` holds. Raises Unusable where that is no label."""
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise Unusable(f"label {name} is not JSON") from None
    return label_of(value.get(key) if isinstance(value, dict) else None, f"{name}: {key}")


def label_of(value: Any, where: str) -> Label:
    """A cell or a value of JSON as a label. Raises Unusable, which names `where`, for what is none."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Unusable(f"label {where} is {str(value)[:20]!r}, and the name or the number of a class was expected")
