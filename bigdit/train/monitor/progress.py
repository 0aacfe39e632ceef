"""What a person sees of a run while it trains: a bar and its figures in place on a terminal, else a line a minute."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from bigdit import log
from bigdit.units import gib

EVERY_S = 60.0
"""Between two lines where nothing can be changed in place: pipes, files, and terminals without control codes."""


VALIDATED = {"validation_loss": "validation", "ema_validation_loss": "validation of the average"}
"""Keys of rows that stay shown until they are measured again, and what they are called."""


class Sight:
    """Shows rows of metrics; `shown` on the main process alone. The last row is shown at the end wherever it goes."""

    def __init__(self, start: int, stop: int, *, shown: bool) -> None:
        self._stop, self._shown = stop, shown
        self._bar = _WithFigures(
            *(TextColumn("train"), BarColumn(bar_width=None), MofNCompleteColumn()),
            console=log.err,
            disable=not (shown and log.err.is_interactive),
        )
        self._task = self._bar.add_task("", total=stop, completed=start)
        self._since = time.monotonic()
        self._unsaid: dict[str, Any] | None = None

    def __enter__(self) -> Sight:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._say()

    def show(self, row: dict[str, Any]) -> None:
        """The row of the last step there is."""
        if not self._bar.disable:
            self._bar.figures = figures(row)
            self._bar.update(self._task, completed=row["step"])
        elif self._shown:
            self._unsaid = row
            if time.monotonic() - self._since >= EVERY_S:
                self._say()

    def _say(self) -> None:
        if self._unsaid is not None:
            log.notice(f"step {self._unsaid['step']}/{self._stop} · {figures(self._unsaid)}")
            self._unsaid, self._since = None, time.monotonic()


class _WithFigures(Progress):
    """A bar, and figures on a line below it."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.figures)


def figures(row: dict[str, Any]) -> str:
    """`loss 0.1234 · lr 1.00e-04 · …`: what of a row is known, and what is left out elsewhere."""
    loss, norm, rate = row["loss"], row["grad_norm"], row["samples_per_second"]
    parts = [f"stage {row['stage']}"] if "stage" in row else []
    parts += [f"loss {'–' if loss is None else f'{loss:.4f}'}", f"lr {row['lr']:.2e}"]
    parts += [f"{name} {row[key]:.4f}" for key, name in VALIDATED.items() if row.get(key) is not None]
    parts += [] if norm is None else [f"norm {norm:.3g}"]
    parts += [f"{rate:.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"]
    parts += [f"MFU {100 * row['mfu']:.1f} %"] if "mfu" in row else []
    memory = ("memory_bytes", "now"), ("peak_memory_bytes", "peak"), ("planned_memory_bytes", "planned")
    parts += [", ".join(f"{gib(row[key])} {word}" for key, word in memory if key in row)]
    return " · ".join([*parts, f"{timedelta(seconds=round(row['seconds_left']))} left"])
