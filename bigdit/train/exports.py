"""Checkpoints in diffusers' format: the last one, and those that the config names."""

from __future__ import annotations

from bigdit import checkpoint, log
from bigdit.config import RunConfig
from bigdit.config.output import EXPORTS


def export_due(run: RunConfig, saved: checkpoint.Checkpoint) -> None:
    """Export a checkpoint that was just saved, where it is due. Raises UserError where it cannot be written."""
    if _is_due(run, saved.step):
        checkpoint.export(saved, run.output / EXPORTS / saved.folder.name)


def export_missed(run: RunConfig, found: checkpoint.Checkpoint) -> None:
    """Export a checkpoint that is due and has no export: the run that saved it was ended before. Raises UserError."""
    folder = run.output / EXPORTS / found.folder.name
    if _is_due(run, found.step) and not folder.exists():
        checkpoint.verify(found)
        checkpoint.export(found, folder)
        log.notice(f"note: wrote {folder}, which an interrupted run had not")


def _is_due(run: RunConfig, step: int) -> bool:
    every = run.train.export_every
    return step == run.train.steps or (every is not None and step % every == 0)
