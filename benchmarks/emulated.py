"""A step's seconds, of an attempt on an emulated GPU."""

from __future__ import annotations

from bigdit.catalog import Gpu
from bigdit.profile.attempt import Attempt
from bigdit.speed.seconds import Cluster, StepTime, launches_of
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of
from bigdit.strategy import Strategy


def step_of(
    attempt: Attempt,
    strategy: Strategy,
    gpu: Gpu,
    cluster: Cluster | None = None,
    *,
    grad_accum_steps: int | None = None,
) -> StepTime:
    """Seconds of a step, from the counted work and launches of an attempt. Raises ValueError for an attempt without
    counts."""
    launches = launches_of(attempt.launched, strategy.grad_accum_steps)
    accumulated = strategy.model_copy(update={"grad_accum_steps": grad_accum_steps or strategy.grad_accum_steps})
    cluster = cluster or Cluster(gpus=strategy.world_size)
    return step_time(work_of(attempt.work, strategy), accumulated, gpu, cluster, launches=launches)
