"""Which checkpoints stay: the newest of a run's own course, some of the older ones, and all of other courses."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from bigdit.checkpoint.folder import name_of
from bigdit.files import TEMPORARY, fsync_folder


def kept_steps(lineage: Sequence[int], keep: int, keep_every: int | None) -> list[int]:
    """Of the steps that a run saved on its way, in their order, the last `keep` and multiples of `keep_every`."""
    return [
        step for i, step in enumerate(lineage) if i >= len(lineage) - keep or (keep_every and step % keep_every == 0)
    ]


def prune(root: Path, lineage: Sequence[int], kept: Sequence[int]) -> None:
    """Delete what the run saved on its way and does not keep. A folder is renamed before, so that none is half there.

    Checkpoints that are not of this lineage, such as those after an earlier one that the run went back to, stay.
    """
    for step in sorted(set(lineage) - set(kept)):
        folder = root / name_of(step)
        doomed = root / f"{TEMPORARY}{folder.name}"
        if folder.is_dir():
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            fsync_folder(root)
        shutil.rmtree(doomed, ignore_errors=True)
