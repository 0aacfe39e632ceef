"""What a reader of the figures must know: each text once, with how often it happened and the script's line."""

from __future__ import annotations

import sys
from typing import Any

from . import frames

_MOST = 100
_found: dict[str, dict[str, Any]] = {}


def add(text: str) -> None:
    """Note `text`; again and again at one line of the script counts as one notice."""
    place, _ = frames.places(frames.of_stack(sys._getframe(1)))
    key = text if place is None else f"{text} {place['file']}:{place['line']}"
    known = _found.get(key)
    if known is not None:
        known["count"] += 1
    elif len(_found) < _MOST:
        _found[key] = {"text": text, "count": 1, "place": place}


def found() -> list[dict[str, Any]]:
    return list(_found.values())


def forget() -> None:
    _found.clear()
