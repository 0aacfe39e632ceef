"""Plans with a strategy of their own, and made-up figures of what a search would have found."""

from __future__ import annotations

from pathlib import Path

from bigdit.catalog.resolve import model_spec
from bigdit.config import load_run
from bigdit.config.plan_file import Asked, Expected, Phase, PlanFile, RecordedLedger
from bigdit.errors import versions
from bigdit.search.plan import Verdict
from bigdit.spec import BatchShape, ModelSpec, Strategy


def plan_of_course(config: Path) -> PlanFile:
    """A plan of the strategy that the YAML at `config` has."""
    run = load_run(config)
    return made_up(model_spec(run.model), BatchShape(latents=(4, 8, 12), text=(32, 64)), run.strategy)


def made_up(
    model: ModelSpec,
    batch: BatchShape,
    strategy: Strategy,
    *,
    gpus_per_node: int = 8,
    verdict: Verdict = "FITS",
    expandable_segments: bool = False,
) -> PlanFile:
    """A plan for A40s, of pictures twice as high and wide as their latents."""
    height, width = (2 * side for side in batch.latents[-2:])
    return PlanFile(
        model=model,
        batch=batch,
        question=Asked(
            gpu="a40",
            gpus_per_node=gpus_per_node,
            resolution=(height, width),
            frames=None,
        ),
        strategy=strategy,
        expandable_segments=expandable_segments,
        expected=Expected(
            verdict=verdict,
            usable_bytes=44 << 30,
            peak_allocated_bytes=39 << 30,
            peak_reserved_bytes=40 << 30,
            process_bytes=(40 << 30, 41 << 30),
            samples_per_second_per_card=(1e-8, 9.25),
            host_bytes=1 << 30,
        ),
        micro_batch_sizes=(),
        ledger=RecordedLedger(granularity=512, phases=(Phase(phase="step", peak_bytes=9, end_bytes=9, at_peak={}),)),
        versions=versions(),
        catalogue="0123456789abcdef",
    )
