"""A run's checkpoints: when one is due, and what is saved and written with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigdit.checkpoint import Saver
from bigdit.config import RunConfig
from bigdit.engines import Ema, Engine
from bigdit.train.metrics import Metrics


class Saves:
    """`step`: how many steps the newest checkpoint has, at first `start`; `described`: what its state.json says."""

    def __init__(
        self,
        run: RunConfig,
        engine: Engine,
        ema: Ema | None,
        saver: Saver,
        metrics: Metrics,
        described: Mapping[str, Any],
        start: int,
    ) -> None:
        self.step = start
        self._run, self._engine, self._ema = run, engine, ema
        self._saver, self._metrics, self._described = saver, metrics, described

    def due(self, step: int) -> bool:
        """Whether the config wants a checkpoint after so many steps."""
        return step % self._run.train.checkpoint_every == 0 or step == self._run.train.steps

    def save(self, step: int) -> None:
        """Copy the state to the host, and have it written while training goes on."""
        self._metrics.flush()
        self._saver.save(self._engine, self._ema, step, {**self._described, "metrics": self._metrics.digest})
        self.step = step

    @property
    def last(self) -> Path | None:
        """The newest checkpoint that is whole."""
        return self._saver.last

    def save_now(self, step: int) -> Path | None:
        """The newest checkpoint, which has all `step` steps; None where there was nothing to save yet."""
        if step > self.step:
            self.save(step)
        self._saver.wait()
        return self.last
