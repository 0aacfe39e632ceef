"""The page that holds what faults did: a section for each command, which rewrites its own alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_HEAD = "# Faults\n"


def write_section(page: Path, title: str, lines: Sequence[str]) -> None:
    """Put `lines` under the heading `title`, in place of what was there, or at the end."""
    text = page.read_text() if page.exists() else _HEAD
    head, *sections = re.split(r"(?m)^(?=## )", text)
    section = "\n".join([f"## {title}", "", *lines, ""])
    kept = {each.splitlines()[0]: each.rstrip("\n") + "\n" for each in sections}
    kept[f"## {title}"] = section
    page.write_text("\n".join([head.rstrip("\n") + "\n", *kept.values()]))
