"""Keys of files that older versions wrote: they are read by the names that they have now."""

from __future__ import annotations

from typing import Any

_NOW = {
    "images_per_second": "samples_per_second",
    "images_per_second_per_card": "samples_per_second_per_card",
}


def renamed(said: Any) -> Any:
    """A file's keys and values, by the keys of today; what is no mapping as it is."""
    return {_NOW.get(key, key): value for key, value in said.items()} if isinstance(said, dict) else said
