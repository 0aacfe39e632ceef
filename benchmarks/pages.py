"""Keep what people wrote below a page's tables."""

from __future__ import annotations

from pathlib import Path


def kept(page: Path, heading: str) -> str:
    """The page's text from this heading on. Raises ValueError if the heading is missing, so that no text is lost."""
    _, found, text = page.read_text().partition(f"\n{heading}\n")
    if not found:
        raise ValueError(f"{page} has no heading {heading!r}, below which its notes stand")
    return f"{heading}\n{text}"
