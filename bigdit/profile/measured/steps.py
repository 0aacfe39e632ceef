"""Two steps on a CUDA device, measured by its caching allocator, and the time of more steps.

There is no dispatch mode, as in a trainer: with one, autograd would not add gradients in place.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bigdit.dist import world_from_env
from bigdit.emulator import on_emulated_gpu
from bigdit.errors import versions
from bigdit.loader.batch import Batch, RawBatch
from bigdit.profile.attempt import StepRequest
from bigdit.profile.measured import GpuRun, Spent, Timing
from bigdit.profile.steps import STEPS, Witness, Workload, build, group, prepare, take, training
from bigdit.profile.unwritten import fill, fill_noise, unwritten_weights
from bigdit.train.measure import GpuPeaks
from bigdit.train.record import PhaseMemory


def run(request: StepRequest, timed_steps: int = 0) -> GpuRun:
    """Two steps of `request` on this rank's empty CUDA device, and so many more that are timed."""
    with unwritten_weights():
        workload = prepare(request, build(request))
    if not on_emulated_gpu():  # emulated GPUs read zeros, which never overflow
        workload = _filled(workload)
    device = torch.device("cuda", world_from_env().local_rank)
    torch.cuda.set_device(device)
    torch.cuda.init()
    with group(request.strategy):
        peaks = _Peaks()
        steps = training(workload, device, peaks)
        for _ in range(STEPS):
            take(steps)
        phases = peaks.close()
        free, total = torch.cuda.mem_get_info(device)
        non_torch = total - free - torch.cuda.memory_reserved(device)
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        timing = _timed(steps, timed_steps) if timed_steps else None
    return GpuRun(
        device=torch.cuda.get_device_name(device),
        params=workload.params,
        phases=phases,
        alloc_retries=retries,
        non_torch_bytes=non_torch if non_torch >= 0 else None,
        timing=timing,
        versions=versions(),
    )


def _filled(workload: Workload) -> Workload:
    """With values for a real GPU: gradients of zeros alone are not finite, and zeros need less power."""
    for module in (workload.model, *(workload.frozen.modules() if workload.frozen else ())):
        fill(module)

    def make() -> Batch | RawBatch:
        made = workload.make()
        if isinstance(made, Batch):
            for tensor in (made.latents, made.text_embeds):
                if tensor is not None:
                    fill_noise(tensor, 1.0)
        return made

    return dataclasses.replace(workload, make=make)


class _Peaks(Witness):
    """The peaks of phases. Until `close`, garbage is collected between phases, as by the recorder, to free cycles."""

    def __init__(self) -> None:
        self._peaks, self._closed = GpuPeaks(), False
        gc.disable()
        gc.collect()
        gc.freeze()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._closed:
            self._peaks.begin(name)
        yield
        if not self._closed:
            gc.collect()

    def close(self) -> tuple[PhaseMemory, ...]:
        gc.collect()
        self._peaks.end()
        gc.enable()
        self._closed = True
        return tuple(self._peaks.found)


def _timed(training: Iterator[bool], steps: int) -> Timing:
    """More steps as in a trainer, where the CPU does not wait for the GPU, and a profiled one."""
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
    """Operators (of the CPU) or kernels by name, the slowest first.

    Ranges that a program names appear as both. They are left out of the kernels, which they contain.
    """
    rows = [row for row in averages if row.device_type == where and row.self_device_time_total > 0]
    if where == DeviceType.CUDA:
        marked = {row.key for row in averages if row.device_type == DeviceType.CPU}
        rows = [row for row in rows if row.key not in marked]
    rows.sort(key=lambda row: -row.self_device_time_total)
    return {row.key: Spent(count=row.count, seconds=row.self_device_time_total / 1e6) for row in rows}
