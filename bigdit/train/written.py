"""The receipt of a stage that came to its end."""

from __future__ import annotations

import time

import torch

from bigdit import log, receipt
from bigdit.config.output import RECEIPT, receipt_of
from bigdit.train.feed import Feed
from bigdit.train.going_on import Start
from bigdit.train.seen.watching import Watching
from bigdit.train.stepped import Stepped
from bigdit.train.store import largest_batch_shape


def write_receipt(start: Start, feed: Feed, stepped: Stepped, seen: Watching, began: float) -> None:
    """Write what the stage's steps since its start were and took into the output; `began`: time.perf_counter() then."""
    stage, strategy, meter = start.reached.stage, stepped.strategy, stepped.meter
    path = stage.run.output / (RECEIPT if stage.end == start.ends[-1] else receipt_of(stage.number))
    steps, seconds = stage.end - start.step, time.perf_counter() - began
    seconds_per_step = seen.metrics.seconds_per_step
    planned = None if meter.measured is None else stepped.planned  # beside nothing
    written = receipt.Receipt(
        kind="train",
        model=start.reached.spec,
        batch=largest_batch_shape(feed.store),
        buckets=len(feed.store.buckets),
        strategy=strategy,
        objective=stepped.objective,
        device=meter.device_name,
        emulated=meter.emulated,
        expandable_segments=meter.expandable_segments,
        compute_capability=meter.compute_capability,
        gpus_per_node=min(strategy.world_size, torch.cuda.device_count() or strategy.world_size),
        steps=steps,
        skipped_steps=seen.skipped.count,
        out_of_memory=stepped.relief.events,
        seconds=round(seconds, 3),
        seconds_per_step=seconds_per_step,
        samples_per_second=round(strategy.global_batch_size / (seconds_per_step or seconds / steps), 2),
        predicted_peak_allocated_bytes=None if planned is None else planned.peak_allocated_bytes,
        predicted_peak_reserved_bytes=None if planned is None else planned.peak_reserved_bytes,
        measured_peak_allocated_bytes=meter.peak_allocated_bytes,
        measured_peak_reserved_bytes=meter.peak_reserved_bytes,
        measured_with=meter.method,
    )
    receipt.write(written, path)
    log.notice(f"wrote {path}")
