"""Measures the memory of the first steps: torch's counters on a GPU, the process's memory on a CPU."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from bigdit.emulator import on_emulated_gpu
from bigdit.train.record import MeasuredMemory, PhaseMemory

STEPS = 2  # optimizer state appears in the first one


class MemoryMeter:
    """Measures peaks of allocated and reserved bytes by phase, from the engine's start through the first two steps.

    On a CPU torch counts nothing: there it is the peak of the whole process, with libraries and data.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._steps = 0
        self._peaks = GpuPeaks()
        self.last_phase = ""
        self.measured: MeasuredMemory | None = None
        self.emulated = self._cuda and on_emulated_gpu()
        # Whichever variable or call set it.
        set_to = torch.cuda.memory._snapshot()["allocator_settings"] if self._cuda else {"expandable_segments": False}
        self.expandable_segments = bool(set_to["expandable_segments"])
        self.device_name = torch.cuda.get_device_name(device) if self._cuda else "cpu"
        self.compute_capability = torch.cuda.get_device_capability(device) if self._cuda else None
        self.method = "torch.cuda.max_memory_allocated" if self._cuda else "the process's peak resident memory"
        if self._cuda:
            self._peaks.begin("init")

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Surround the phase `name` of a training step."""
        self.last_phase = name
        return self._peaks.phase(name) if self._cuda and self._steps < STEPS else record_function(name)

    def end_step(self) -> None:
        """Count a step that was taken."""
        self._steps += 1
        if self._steps == STEPS:
            self._finish()

    def _finish(self) -> None:
        self._peaks.end()
        self.measured = MeasuredMemory(
            method=self.method,
            steps=STEPS,
            phases=tuple(self._peaks.found),
            peak_allocated_bytes=self.now()["peak_memory_bytes"],
            peak_reserved_bytes=self._peaks.highest()[1] if self._cuda else None,
        )

    def receipt_fields(self) -> dict[str, Any]:
        """The fields of a receipt that are known here; peaks are None until they are measured."""
        found = self.measured
        return {
            "device": self.device_name,
            "emulated": self.emulated,
            "expandable_segments": self.expandable_segments,
            "compute_capability": self.compute_capability,
            "measured_peak_allocated_bytes": None if found is None else found.peak_allocated_bytes,
            "measured_peak_reserved_bytes": None if found is None else found.peak_reserved_bytes,
            "measured_with": self.method,
        }

    def now(self) -> dict[str, int]:
        """`memory_bytes` now, and their peak so far: allocated by torch since the engine's start, or the process's."""
        if not self._cuda:
            return host_now()
        highest = max(self._peaks.highest()[0], torch.cuda.max_memory_allocated())
        return {"memory_bytes": torch.cuda.memory_allocated(), "peak_memory_bytes": highest}


class GpuPeaks:
    """The peaks of phases on a GPU, and over all. torch has one peak counter, which each phase resets."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._found: dict[str, tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surround the phase `name`, which lasts until the next one begins."""
        self.begin(name)
        with record_function(name):
            yield

    def begin(self, name: str) -> None:
        """Begin a phase."""
        self.end()
        self._phase = name
        torch.cuda.reset_peak_memory_stats()

    def end(self) -> None:
        """End the last phase."""
        if self._phase is not None:
            before = self._found.get(self._phase, (0, 0))
            now = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self._found[self._phase] = max(before[0], now[0]), max(before[1], now[1])
            self._phase = None

    @property
    def found(self) -> list[PhaseMemory]:
        """The ended phases, in order of first occurrence."""
        return [
            PhaseMemory(phase=phase, allocated_bytes=allocated, reserved_bytes=reserved)
            for phase, (allocated, reserved) in self._found.items()
        ]

    def highest(self) -> tuple[int, int]:
        """The peaks of allocated and reserved bytes over all ended phases."""
        allocated, reserved = zip((0, 0), *self._found.values(), strict=True)
        return max(allocated), max(reserved)


def host_now() -> dict[str, int]:
    """`memory_bytes` of this process now, on Linux only, and their peak so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak, pages = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, Path("/proc/self/statm")
    if not pages.exists():
        return {"peak_memory_bytes": peak}
    now = int(pages.read_text().split()[1]) * resource.getpagesize()
    return {"memory_bytes": now, "peak_memory_bytes": max(now, peak)}  # the kernel updates the peak later
