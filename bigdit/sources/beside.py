"""The captions that stand beside a picture or a video of a folder, in a `.json` or a `.txt` of its name."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

from bigdit import log
from bigdit.files import leads_out
from bigdit.sources.captions import json_captions, text_captions
from bigdit.sources.disk import CAPTION_BYTES, read_file
from bigdit.sources.protocol import Caption, Unusable
from bigdit.units import how_many


def captions_beside(root: Path, stem: Path, follow_links: bool) -> tuple[Caption, ...]:
    """Of the `.json` where it has captions, else of the `.txt`. Raises Unusable where there are none."""
    captions = None
    path = Path(f"{stem}.json")
    with contextlib.suppress(FileNotFoundError):
        captions = json_captions(_read(root, path, follow_links), path.name)
    if captions is not None:
        return captions
    path = Path(f"{stem}.txt")
    try:
        return text_captions(_read(root, path, follow_links), path.name)
    except FileNotFoundError:
        raise Unusable(f"caption {path.name} is missing") from None


def check_link(root: Path, path: Path, follow_links: bool) -> None:
    """Raise Unusable for a link that leads out of `root`, unless links are followed."""
    if not follow_links and leads_out(root, path):
        raise Unusable(f"{path.name} is a link out of its folder, and is read with the source's follow_links alone")


def _read(root: Path, path: Path, follow_links: bool) -> bytes:
    check_link(root, path, follow_links)
    return read_file(path, CAPTION_BYTES)


def tell_passed_over(key: str, root: Path, passed_over: Counter[str]) -> None:
    """Say in a line what of the folder, named by `key`, is neither a picture nor a caption, where anything is."""
    if kinds := ", ".join(how_many(count, kind) for kind, count in passed_over.most_common(5) if count):
        log.notice(f"{key}: {root} also holds what is not read: {kinds}")
