"""Kept texts under a checksum: a file that was cut or changed is known before what it says is believed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from bigdit.files import read_bytes, write_text


def write_sealed(path: Path, text: str) -> None:
    """Write a text under its SHA-256, as a whole or not at all. Raises UserError where it cannot be written."""
    write_text(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def read_sealed(path: Path) -> bytes:
    """The text that was written. Raises ValueError where the file is not as it was written; OSError."""
    seal, _, text = read_bytes(path).partition(b"\n")
    if seal != hashlib.sha256(text).hexdigest().encode():
        raise ValueError(f"{path} is not as it was written")
    return text
