"""What pages link to outside docs/ comes along into the site: benchmarks, images, recipes, README as its first page.

So links are written as they work in the repository, and `mkdocs build --strict` finds those that lead nowhere.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
FIRST = "README.md"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
"""The target of a link or an image, without its anchor, unless it is an address or an anchor alone."""


def targets(page: str) -> list[str]:
    """The files that a page links to, by their paths in the repository."""
    text = _without_code((ROOT / page).read_text(encoding="utf-8"))
    return [posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in LINK.findall(text)]


def carried() -> list[str]:
    """The files outside docs/ that belong to the site: README, and all that pages link to, through others too."""
    pages = [file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md")]
    waiting, found = [FIRST, *pages], set()
    while waiting:
        page = waiting.pop()
        for target in (page, *targets(page)):
            if not target.startswith("docs/") and target not in found and (ROOT / target).is_file():
                found.add(target)
                waiting += [target] if target.endswith(".md") else []
    return sorted(found)


def place(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return "index.md" if path == FIRST else path.removeprefix("docs/")


def origin(uri: str) -> str:
    """The file of the repository at this place of the site."""
    return FIRST if uri == "index.md" else f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' event: add the files."""
    for path in carried():
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs' event: links of the repository as links of the site."""
    uri = page.file.src_uri
    here = posixpath.dirname(origin(uri))

    def moved(link: re.Match[str]) -> str:
        target = place(posixpath.normpath(posixpath.join(here, link[0])))
        return os.path.relpath(target, posixpath.dirname(uri) or ".")

    return "".join(
        part if part.startswith("```") else LINK.sub(moved, part)
        for part in re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    )


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
