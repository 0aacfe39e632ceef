"""A run's checkpoints, EMA snapshots and exports: when they are due, and what they hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bigdit import checkpoint, log
from bigdit.checkpoint import Saver
from bigdit.config.run import EXPORTS, RunConfig
from bigdit.engines import Ema, Engine
from bigdit.train.monitor.metrics import Metrics
from bigdit.units import gib, how_many


def snapshot_notices(run: RunConfig, model: nn.Module) -> list[str]:
    """The disk space that a run's EMA snapshots take, if it makes any; `model` as it is trained."""
    every, ema = run.train.snapshot_every, run.strategy.ema
    if every is None or ema is None:
        return []
    each = 4 * ema.count * sum(weights.numel() for weights in model.parameters() if weights.requires_grad)
    line = f"each snapshot of {how_many(ema.count, 'EMA')} takes {gib(each)} of disk"
    if (steps := run.train.steps) is None:
        return [f"{line}; how many train.epochs {run.train.epochs:g} make is not known yet"]
    count = steps // every
    return [f"{line}, and all {count:,} of train.steps {steps} (train.snapshot_every {every}) take {gib(count * each)}"]


def due(run: RunConfig, step: int, end: int) -> bool:
    """Whether a checkpoint is due after `step` steps of a run or stage that ends at step `end`."""
    return step % run.train.checkpoint_every == 0 or step == end


class Saves:
    """Saves the state of a run. `step`: that of the newest checkpoint, at first `start`.

    `described`: what state.json says; `end`: the last step of the run or stage.
    """

    def __init__(
        self,
        run: RunConfig,
        engine: Engine,
        ema: Ema | None,
        saver: Saver,
        metrics: Metrics,
        described: Mapping[str, Any],
        start: int,
        end: int,
    ) -> None:
        self.step = start
        self._end = end
        self._run, self._engine, self._ema = run, engine, ema
        self._saver, self._metrics, self._described = saver, metrics, described

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        return due(self._run, step, self._end)

    def snapshot_due(self, step: int) -> bool:
        """Whether an EMA snapshot is due after `step` steps."""
        every = self._run.train.snapshot_every
        return every is not None and step % every == 0

    def save(self, step: int) -> None:
        """Copy the state to CPU memory, and write it while training continues; with a snapshot if one is due."""
        self._metrics.flush()
        described = {**self._described, "metrics": self._metrics.digest}
        self._saver.save(self._engine, self._ema, step, described, snapshot=self.snapshot_due(step))
        self.step = step

    def snapshot(self, step: int) -> None:
        """Save a snapshot of the EMA alone, in the same way."""
        self._saver.save(self._engine, self._ema, step, self._described, whole=False, snapshot=True)

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint."""
        return self._saver.last

    def save_now(self, step: int) -> Path | None:
        """The newest checkpoint, which has all `step` steps; None if there is nothing to save yet."""
        if step > self.step:
            self.save(step)
        self._saver.wait()
        return self.last


def export_due(run: RunConfig, ends: Collection[int], saved: checkpoint.Checkpoint) -> None:
    """Export a new checkpoint if that is due. Raises UserError if it cannot be written."""
    if is_due(run, ends, saved.step):
        folder = run.output / EXPORTS / saved.folder.name
        checkpoint.export(saved, folder)
        log.notice(f"wrote {folder}")


def export_missed(run: RunConfig, ends: Collection[int], found: checkpoint.Checkpoint) -> None:
    """Export an older checkpoint if that is due: its run was interrupted before. Raises UserError."""
    folder = run.output / EXPORTS / found.folder.name
    if is_due(run, ends, found.step) and not folder.exists():
        checkpoint.verify(found)
        checkpoint.export(found, folder)
        log.notice(f"note: wrote {folder}, which an interrupted run had left out")


def is_due(run: RunConfig, ends: Collection[int], step: int) -> bool:
    """Whether a step's checkpoint is exported, by train.export_every or at the end of a stage."""
    every = run.train.export_every
    return step in ends or (every is not None and step % every == 0)
