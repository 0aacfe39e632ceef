"""How long a step takes on a GPU: a roofline over what its operators compute and move."""

from __future__ import annotations

from bigdit.catalog import Gpu
from bigdit.spec import Strategy
from bigdit.speed.calibration import Calibration
from bigdit.speed.cluster import Cluster
from bigdit.speed.links import copy_seconds, exchange_seconds, host_seconds
from bigdit.speed.roofline import LAUNCH_SECONDS, kernel_seconds
from bigdit.speed.seconds import LAUNCHED_SECONDS, NO_TIME, PARTS, Handed, Interval, Launches, StepTime, bound
from bigdit.speed.work import Load, Work


def step_time(
    work: Work,
    strategy: Strategy,
    gpu: Gpu,
    cluster: Cluster,
    calibration: Calibration | None = None,
    launches: Launches | None = None,
) -> StepTime:
    """Seconds of a step that does `work` on each `gpu` of `cluster`.

    Of `strategy` counts the precision, grad_accum_steps (whatever the attempt had) and HSDP's groups. Reading data,
    checkpoints and validation are not in it. `calibration` moves and narrows the interval to what was measured;
    `launches` were counted where the step ran on an emulated card, and else are the operators.
    """
    micro_batches = (work.micro * strategy.grad_accum_steps + work.last).clamped()
    parts = dict.fromkeys(PARTS, NO_TIME)
    # The update waits for all gradients: nothing of it runs beside the micro-batches. The host, which hands operators
    # to the GPU, runs ahead where kernels last longer.
    stages = (micro_batches, work.step.clamped())
    each, counts = LAUNCH_SECONDS, tuple(load.at("device").calls for load in stages)
    if launches is not None:
        each, counts = LAUNCHED_SECONDS, (launches.micro * strategy.grad_accum_steps, launches.step)
    for load, count in zip(stages, counts, strict=True):
        for name, seconds in _stage(load, each * count, strategy, gpu, cluster).items():
            parts[name] += seconds
    waits = bound(parts["launches"], sum(parts.values(), NO_TIME))
    handed = Handed(count=sum(counts), counted=launches is not None, seconds=each * sum(counts), bound=waits)
    if calibration is not None:
        parts = calibration.applied(parts)
    shown = {name: part for name, part in parts.items() if part.high > 0}
    return StepTime(seconds=sum(parts.values(), NO_TIME), parts=shown, launches=handed)


def _stage(load: Load, launches: Interval, strategy: Strategy, gpu: Gpu, cluster: Cluster) -> dict[str, Interval]:
    """The parts of work whose kernels, launches, collectives and copies may run beside one another."""
    kernels = kernel_seconds(load, gpu, strategy.precision)
    host = host_seconds(load, cluster)
    beside = {
        # One thread computes on the host and launches, so that both together hide behind the card's work.
        "host": host,
        "launches": launches,
        "collectives": exchange_seconds(load, strategy, gpu, cluster),
        "copies to and from the host": copy_seconds(load, gpu),
    }
    low = sum(seconds.low for seconds in kernels.values())
    high = sum(seconds.high for seconds in kernels.values())
    parts = dict(kernels)
    for name, seconds in beside.items():
        waits = max(0.0, seconds.low + (host.low if name == "launches" else 0.0) - low)
        low += waits
        # Kernels that last longer hide launches, whatever else goes wrong.
        whole = max(waits, seconds.high - high) if name == "launches" else seconds.high
        parts[name] = Interval(low=waits, high=whole)
    return parts
