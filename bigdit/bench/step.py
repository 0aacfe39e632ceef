"""The single-process step, run for real and rehearsed: how far the prediction was off, and how fast it went."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from bigdit import engines, models
from bigdit.dist import World
from bigdit.memory.allocator import replay
from bigdit.receipt import Receipt
from bigdit.rehearse import RehearsalRequest, rehearse
from bigdit.rehearse.data import batch, feed
from bigdit.rehearse.request import A100_MULTIPROCESSORS, Kernels
from bigdit.spec import BatchShape, ModelSpec, ObjectiveSpec, Strategy
from bigdit.store import FeatureStore
from bigdit.train import store
from bigdit.train.measure import MemoryMeter
from bigdit.train.processes.process import process_group
from bigdit.train.step import train_step


def bench_step(
    spec: ModelSpec, shape: BatchShape, strategy: Strategy, objective: ObjectiveSpec, *, steps: int, seed: int
) -> Receipt:
    """A receipt: predicted and measured peak bytes, seconds a step (median, the first two steps left out).

    On a GPU the measured peaks are the caching allocator's, and the predicted ones those of its replay; on a CPU both
    are the recorder's.
    """
    world = World()
    with process_group(world, needed=False) as device:
        kernels: Kernels = "cuda" if device.type == "cuda" else "cpu"
        card = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        request = RehearsalRequest(
            model=spec,
            batch=shape,
            strategy=strategy,
            micro_batch_sizes=(strategy.micro_batch_size,),
            objective=objective,
            kernels=kernels,
            compute_capability=(8, 0) if card is None else (card.major, card.minor),
            multiprocessors=A100_MULTIPROCESSORS if card is None else card.multi_processor_count,
        )
        found = rehearse(request).sizes[0]
        predicted, predicted_reserved = found.ledger.peak_allocated_bytes, None

        family = models.family(spec.class_name)
        model = models.build(spec, device="cpu", dtype=engines.compute_dtype(strategy), seed=seed)
        models.equip(model, family, strategy)
        extras = family.extras(model)
        seconds = []
        with MemoryMeter(device) as meter:
            meter.loaded(model)
            engine = engines.create(strategy, model, family, device=device, world=world)
            ema = engines.ema_of(engine)
            meter.watch(engine, ema)
            ahead = feed(lambda: batch(shape, strategy, extras), strategy, pin=device.type == "cuda")
            for _ in range(steps):
                micro_batches = next(ahead)
                began = time.perf_counter()
                with meter.step(micro_batches) as (batches, phase):
                    result = train_step(
                        engine, family, objective, batches, lr=strategy.optimizer.lr, ema=ema, phase=phase
                    )
                float(result.loss)  # waits for the device
                seconds.append(time.perf_counter() - began)
                del result, batches, micro_batches  # or they would live, and be measured, in the next step
    measured = meter.peak_allocated_bytes
    assert measured is not None
    if card is not None:  # whose allocator counts whole blocks
        replayed = replay(found.timeline, card.total_memory, expandable_segments=meter.expandable_segments)
        predicted, predicted_reserved = replayed.peak_allocated_bytes, replayed.peak_reserved_bytes
    median = statistics.median(seconds[2:])
    return Receipt(
        kind="bench",
        model=spec,
        batch=shape,
        buckets=1,
        strategy=strategy,
        objective=objective,
        device=meter.device_name,
        emulated=meter.emulated,
        expandable_segments=meter.expandable_segments,
        compute_capability=meter.compute_capability,
        gpus_per_node=1,
        steps=steps,
        seconds=round(sum(seconds), 3),
        seconds_per_step=round(median, 5),
        images_per_second=round(strategy.global_batch_size / median, 2),
        predicted_peak_allocated_bytes=predicted,
        predicted_peak_reserved_bytes=predicted_reserved,
        measured_peak_allocated_bytes=measured,
        measured_peak_reserved_bytes=meter.peak_reserved_bytes,
        measured_with=meter.method,
        error_percent=round(100 * (predicted - measured) / measured, 4),
    )


def largest_batch_shape(features: Path) -> BatchShape:
    """Shapes of the largest bucket in a feature store, with text of its max_tokens."""
    return store.largest_batch_shape(FeatureStore.open(features))
