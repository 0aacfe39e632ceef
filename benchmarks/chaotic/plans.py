"""A plan.yaml for a course: its own strategy, with made-up figures of what a search would have found."""

from __future__ import annotations

from pathlib import Path

from bigdit.catalog.resolve import model_spec
from bigdit.config import load_run, strategy_of
from bigdit.config.plan_file import Asked, Expected, Phase, PlanFile, RecordedLedger
from bigdit.errors import versions
from bigdit.spec import BatchShape


def plan_of_course(config: Path) -> PlanFile:
    """The plan that the YAML at `config` follows; what a plan decides is taken from the YAML as well."""
    run = load_run(config)
    strategy = strategy_of(run, run.engine.processes)
    return PlanFile(
        model=model_spec(run.model),
        batch=BatchShape(latents=(4, 8, 12), text=(32, 64)),
        question=Asked(
            gpu="a40",
            gpus=1,
            gpus_per_node=8,
            resolution=(16, 24),
            frames=None,
            global_batch_size=None,
            images=None,
            epochs=1.0,
            price=None,
            pins={},
        ),
        strategy=strategy,
        expandable_segments=False,
        expected=Expected(
            verdict="FITS",
            usable_bytes=44 << 30,
            peak_allocated_bytes=1 << 30,
            peak_reserved_bytes=1 << 30,
            process_bytes=(1 << 30, 2 << 30),
            images_per_second_per_card=(1.0, 2.0),
        ),
        micro_batch_sizes=(),
        ledger=RecordedLedger(granularity=512, phases=(Phase(phase="step", peak_bytes=9, end_bytes=9, at_peak={}),)),
        versions=versions(),
        catalogue="0123456789abcdef",
    )
