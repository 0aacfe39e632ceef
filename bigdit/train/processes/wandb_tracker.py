"""W&B's tracker for rows and pictures in any order: a picture is decoded while later steps are taken."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import WandBTracker


class AnyOrder(WandBTracker):
    """W&B drops what comes with a lower step of its own than the last: here `step` is a value beside the others, and
    the axis that all are drawn over."""

    def start(self) -> None:
        """Begin a run."""
        super().start()
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """What was there after `step` steps."""
        super().log({**values, "step": step}, **options)
