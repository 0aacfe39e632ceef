"""What a reader of the figures must know: each text once, with how often it happened and the script's line."""

from __future__ import annotations

import sys
from typing import Any

from . import frames

_MOST = 100
_found: dict[str, dict[str, Any]] = {}


def add(text: str) -> None:
    """Note `text`; again and again counts as one notice."""
    known = _found.get(text)
    if known is not None:
        known["count"] += 1
    elif len(_found) < _MOST:
        place, _ = frames.places(frames.of_stack(sys._getframe(1)))
        _found[text] = {"text": text, "count": 1, "place": place}


def found() -> list[dict[str, Any]]:
    return list(_found.values())


def forget() -> None:
    _found.clear()
