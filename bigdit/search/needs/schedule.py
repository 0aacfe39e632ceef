"""From one step to the whole training: days, GPU-hours, money."""

from __future__ import annotations

import math

from bigdit.search.plan import Run
from bigdit.speed.seconds import StepTime

HOUR = 3600.0


def run(images: int, epochs: float, global_batch_size: int, step: StepTime, gpus: int, price: float | None) -> Run:
    """`images` seen `epochs` times in steps of `global_batch_size`, the last one full too.

    `price` is of one card for an hour; what the cards cost while nothing is trained (reading the first data,
    checkpoints, validation, a queue) is not in it.
    """
    steps = max(1, math.ceil(images * epochs / global_batch_size))
    seconds = step.seconds * steps
    gpu_hours = seconds * (gpus / HOUR)
    return Run(
        steps=steps,
        seconds=seconds,
        gpu_hours=gpu_hours,
        money=None if price is None else gpu_hours * price,
        samples_per_second=step.seconds.per(global_batch_size),
    )
