"""Which state of the catalogue a plan was made with."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources


@cache
def revision() -> str:
    """Sixteen hex digits over the catalogue's JSON files: any change of a figure changes them."""
    digest = hashlib.sha256()
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
