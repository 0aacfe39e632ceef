"""Snapshots of a run's averages: `OUTPUT/averages/step-00000800`, as checkpoints lie, but of the averages alone.

    engine/          rank-00000-of-00002.safetensors: the runs of averages that a process had
    snapshot.json    step, how many steps the averages have taken in, model, strategy, shapes, checksums

A checkpoint names those of its own course, each by the checksum of its snapshot.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigdit.checkpoint.folder import Checkpoint, Saved, SavedState, read_state, write_state
from bigdit.config.output import AVERAGES
from bigdit.errors import UserError

FILE = "snapshot.json"


@dataclass(frozen=True)
class Snapshot(Saved):
    """A whole snapshot on disk; `digest` is the checksum of what its snapshot.json says."""

    digest: str


def write_snapshot(folder: Path, state: dict[str, Any]) -> Path:
    """Write snapshot.json, with a checksum of what it says."""
    return write_state(folder, {key: state[key] for key in SavedState.model_fields}, FILE)


def open_snapshot(folder: Path) -> Snapshot:
    """A snapshot's folder. Raises UserError where its snapshot.json is missing or is not what was written."""
    return Snapshot(folder, *read_state(folder, FILE, "a snapshot of averages", SavedState))


def snapshots_of(checkpoint: Checkpoint) -> list[Snapshot]:
    """Those that the checkpoint's run made before it and that are there still, the oldest first.

    Raises UserError where another run's lies in the place of one.
    """
    root, found = checkpoint.folder.absolute().parents[1] / AVERAGES, []
    for name, digest in sorted(checkpoint.state["snapshots"].items()):
        if not (root / name).is_dir():
            continue
        found.append(open_snapshot(root / name))
        if found[-1].digest != digest:
            raise UserError(
                f"{root / name} is not the snapshot that {checkpoint.folder} was trained with, but another run's, or "
                "of another course of this one; take it away, and averages are made without it"
            )
    return sorted(found, key=lambda each: each.step)
