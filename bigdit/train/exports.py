"""Checkpoints in diffusers' format: the last one, and those that the config names."""

from __future__ import annotations

from collections.abc import Collection

from bigdit import checkpoint, log
from bigdit.config import RunConfig
from bigdit.config.run import EXPORTS


def export_due(run: RunConfig, ends: Collection[int], saved: checkpoint.Checkpoint) -> None:
    """Export a checkpoint that was just saved, where it is due: where train.export_every says so, and at the `ends` of
    stages. Raises UserError where it cannot be written."""
    if is_due(run, ends, saved.step):
        checkpoint.export(saved, run.output / EXPORTS / saved.folder.name)


def export_missed(run: RunConfig, ends: Collection[int], found: checkpoint.Checkpoint) -> None:
    """Export a checkpoint that is due and has no export: the run that saved it was ended before. Raises UserError."""
    folder = run.output / EXPORTS / found.folder.name
    if is_due(run, ends, found.step) and not folder.exists():
        checkpoint.verify(found)
        checkpoint.export(found, folder)
        log.notice(f"note: wrote {folder}, which an interrupted run had not")


def is_due(run: RunConfig, ends: Collection[int], step: int) -> bool:
    """Whether the checkpoint of a step is exported."""
    every = run.train.export_every
    return step in ends or (every is not None and step % every == 0)
