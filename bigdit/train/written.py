"""The receipt of a run that came to its end."""

from __future__ import annotations

import time

import torch

from bigdit import log, receipt
from bigdit.catalog.families import objective_of
from bigdit.config import RunConfig
from bigdit.loader.raw_store import RawStore
from bigdit.spec import ModelSpec, Strategy
from bigdit.store import FeatureStore
from bigdit.train.beside_plan import PlannedMemory
from bigdit.train.measure import MemoryMeter
from bigdit.train.metrics import Metrics
from bigdit.train.relief import Relief
from bigdit.train.store import largest_batch_shape


def write_receipt(
    run: RunConfig,
    spec: ModelSpec,
    strategy: Strategy,
    store: FeatureStore | RawStore,
    meter: MemoryMeter,
    planned: PlannedMemory | None,
    metrics: Metrics,
    relief: Relief,
    skipped_steps: int,
    steps: int,
    began: float,
    name: str,
) -> None:
    """Write what the last `steps` steps were and took into the output, as the file `name`; `began`:
    time.perf_counter() at their start."""
    path, seconds = run.output / name, time.perf_counter() - began
    if meter.measured is None:
        planned = None  # beside nothing
    written = receipt.Receipt(
        kind="train",
        model=spec,
        batch=largest_batch_shape(store),
        buckets=len(store.buckets),
        strategy=strategy,
        objective=objective_of(spec, run.objective),
        device=meter.device_name,
        emulated=meter.emulated,
        expandable_segments=meter.expandable_segments,
        compute_capability=meter.compute_capability,
        gpus_per_node=min(strategy.world_size, torch.cuda.device_count() or strategy.world_size),
        steps=steps,
        skipped_steps=skipped_steps,
        out_of_memory=relief.events,
        seconds=round(seconds, 3),
        seconds_per_step=metrics.seconds_per_step,
        samples_per_second=round(strategy.global_batch_size / (metrics.seconds_per_step or seconds / steps), 2),
        predicted_peak_allocated_bytes=None if planned is None else planned.peak_allocated_bytes,
        predicted_peak_reserved_bytes=None if planned is None else planned.peak_reserved_bytes,
        measured_peak_allocated_bytes=meter.peak_allocated_bytes,
        measured_peak_reserved_bytes=meter.peak_reserved_bytes,
        measured_with=meter.method,
    )
    receipt.write(written, path)
    log.notice(f"wrote {path}")
