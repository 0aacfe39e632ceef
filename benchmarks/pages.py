"""Pages that scripts write: what people wrote below the tables stays."""

from __future__ import annotations

from pathlib import Path


def kept(page: Path, heading: str) -> str:
    """The page's text from this heading on. Raises ValueError where it is not there, so that no text is lost."""
    _, found, text = page.read_text().partition(f"\n{heading}\n")
    if not found:
        raise ValueError(f"{page} has no heading {heading!r}, below which its notes stand")
    return f"{heading}\n{text}"
