"""What a plan said that a step takes of a card, beside what the first steps took."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bigdit.config.plan_file import PlanFile
from bigdit.spec import Strategy
from bigdit.train.measure import MemoryMeter
from bigdit.units import gib


@dataclass(frozen=True)
class BesidePlan:
    """Bytes of one process: what was planned for samples of `resolution` (height, width) in pixels, and measured."""

    resolution: tuple[int, int]
    planned_allocated_bytes: int
    planned_reserved_bytes: int
    reserved_bytes: int

    def __str__(self) -> str:
        height, width = self.resolution
        more = self.reserved_bytes / self.planned_reserved_bytes - 1
        return (
            f"planned {gib(self.planned_reserved_bytes)} at {height} × {width}, measured {gib(self.reserved_bytes)} "
            f"({100 * more:+.1f} %) reserved by torch"
        )


def planned_bytes(plan: PlanFile | None, strategy: Strategy, device: torch.device) -> int | None:
    """What was planned to be allocated on a card by steps of this size; None where nothing was."""
    if plan is None or strategy.step_size != plan.strategy.step_size or device.type != "cuda":
        return None
    return plan.expected.peak_allocated_bytes


def beside_plan(plan: PlanFile | None, strategy: Strategy, meter: MemoryMeter) -> BesidePlan | None:
    """None where there is no plan, it was left for a smaller step, or nothing was measured on a card yet: a plan's
    bytes are those of CUDA's kernels."""
    measured = meter.peak_reserved_bytes
    if plan is None or strategy.step_size != plan.strategy.step_size or measured is None:
        return None
    expected = plan.expected
    return BesidePlan(plan.question.resolution, expected.peak_allocated_bytes, expected.peak_reserved_bytes, measured)
