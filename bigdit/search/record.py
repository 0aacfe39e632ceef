"""A plan as the file that training reads: without its pictures, fronts and timelines."""

from __future__ import annotations

from bigdit.config.plan_file import Asked, Expected, LargestMicroBatch, PlanFile, RecordedLedger
from bigdit.search.plan import Plan


def record(plan: Plan) -> PlanFile:
    """What `bigdit train --plan` needs of `plan`, and what its receipt is to be compared with."""
    question, chosen = plan.question, plan.chosen
    rate = chosen.samples_per_second_per_card
    return PlanFile(
        model=question.model.spec,
        batch=plan.batch,
        question=Asked(
            gpu=question.gpu.name,
            gpus=question.cluster.gpus,
            gpus_per_node=question.cluster.gpus_per_node,
            resolution=question.resolution,
            frames=question.frames,
            global_batch_size=question.global_batch_size,
            images=question.images,
            epochs=question.epochs,
            price=question.price,
            pins=question.pins.model_dump(mode="json"),
        ),
        strategy=chosen.strategy,
        expandable_segments=True,
        expected=Expected(
            verdict=plan.verdict,
            usable_bytes=question.gpu.usable_bytes,
            peak_allocated_bytes=chosen.peak_allocated_bytes,
            peak_reserved_bytes=chosen.peak_reserved_bytes,
            process_bytes=(chosen.process.low_bytes, chosen.process.high_bytes),
            samples_per_second_per_card=(rate.low, rate.high),
            host_bytes=plan.host.node_bytes,
        ),
        micro_batch_sizes=tuple(LargestMicroBatch(**limit.model_dump()) for limit in plan.buckets),
        smaller=plan.smaller,
        ledger=RecordedLedger.model_validate(plan.ledger.model_dump(mode="json")),
        versions=plan.versions,
        catalogue=plan.catalogue,
    )
