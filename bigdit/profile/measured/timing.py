"""How long steps take on a real card, and which kernels take it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bigdit.profile.measured.run import Spent, Timing


def timed(training: Iterator[bool], steps: int) -> Timing:
    """`steps` more steps of `training` as a trainer takes them, whose host does not wait for the card, and a profiled
    one."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        next(training)
    handed_over = time.perf_counter() - began
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        next(training)
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    return Timing(
        steps=steps,
        seconds_per_step=took / steps,
        host_seconds_per_step=handed_over / steps,
        operators=_spent(averages, DeviceType.CPU),
        kernels=_spent(averages, DeviceType.CUDA),
    )


def _spent(averages: Any, where: DeviceType) -> dict[str, Spent]:
    """Operators (of the CPU) or kernels by name, those first whose kernels took longest.

    Ranges that a program marks by a name stand on both sides, around kernels that are there already.
    """
    rows = [row for row in averages if row.device_type == where and row.self_device_time_total > 0]
    if where == DeviceType.CUDA:
        marked = {row.key for row in averages if row.device_type == DeviceType.CPU}
        rows = [row for row in rows if row.key not in marked]
    rows.sort(key=lambda row: -row.self_device_time_total)
    return {row.key: Spent(count=row.count, seconds=row.self_device_time_total / 1e6) for row in rows}
