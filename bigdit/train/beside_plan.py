"""What a plan said that a step takes of a card, beside what the first steps took. Nothing here imports torch."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from bigdit.config.plan_file import PlanFile, unplanned
from bigdit.emulator import on_emulated_card
from bigdit.spec import Strategy, Strict
from bigdit.units import gib


class PlannedMemory(Strict):
    """Bytes of one process as they were planned, for samples of `resolution` (height, width) in pixels: the most that
    is allocated, by phase and in all, and reserved by torch. `compiled`: blocks are, which were planned as they are
    written."""

    resolution: tuple[PositiveInt, PositiveInt]
    phases: dict[str, NonNegativeInt]
    peak_allocated_bytes: PositiveInt
    peak_reserved_bytes: PositiveInt
    compiled: bool = False

    def beside(self, reserved_bytes: int) -> str:
        """A line: what was planned to be reserved, and what was measured."""
        height, width = self.resolution
        return (
            f"planned {gib(self.peak_reserved_bytes)} at {height} × {width}, measured {gib(reserved_bytes)} "
            f"({off(self.peak_reserved_bytes, reserved_bytes)}) reserved by torch"
            + ("; blocks are compiled, and planned as they are written" if self.compiled else "")
        )


def off(planned: int, measured: int) -> str:
    """How much more than planned was measured: `+0.6 %`."""
    return f"{100 * (measured / planned - 1):+.1f} %"


def planned_memory(plan: PlanFile | None, strategy: Strategy, device: str) -> PlannedMemory | None:
    """What was planned for these steps. None where there is no plan, it predicts other steps, or `device` is no `cuda`:
    a plan's bytes are those of CUDA's kernels."""
    if plan is None or unplanned(strategy, plan) or device != "cuda":
        return None
    return PlannedMemory(
        resolution=plan.question.resolution,
        phases={phase.phase: phase.peak_bytes for phase in plan.ledger.phases},
        peak_allocated_bytes=plan.expected.peak_allocated_bytes,
        peak_reserved_bytes=plan.expected.peak_reserved_bytes,
        compiled=strategy.compile_blocks and not on_emulated_card(),
    )
