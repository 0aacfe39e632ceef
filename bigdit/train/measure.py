"""How much memory the first steps really took, by the device's own count or by the recorder."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from bigdit.emulator import on_emulated_card
from bigdit.engines import Ema, Engine
from bigdit.loader.batch import Batch
from bigdit.record import Recorder, Watch
from bigdit.train.step import Phase

STEPS = 2  # optimizer state appears in the first one


class MemoryMeter:
    """The peak of allocated (on a GPU, reserved) bytes from the engine's start through the first two steps.

    On a GPU the caching allocator counts. A CPU's allocator does not, so the recorder of the rehearsal tracks
    the real tensors, and is taken off after the second step since it slows every operation.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._recorder = None if self._cuda else Recorder("cpu")
        self._recording = ExitStack()
        self._watch: Watch | None = None
        self._steps = 0
        self.peak_allocated_bytes: int | None = None
        self.peak_reserved_bytes: int | None = None
        self.emulated = self._cuda and on_emulated_card()
        self.expandable_segments = self._cuda and _expandable_segments()
        self.device_name = torch.cuda.get_device_name(device) if self._cuda else "cpu"
        self.compute_capability = torch.cuda.get_device_capability(device) if self._cuda else None
        self.method = "torch.cuda.max_memory_allocated" if self._cuda else "storages of the first two steps"

    def __enter__(self) -> MemoryMeter:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            assert self._recorder is not None
            self._recording.enter_context(self._recorder)
            self._recording.enter_context(self._recorder.phase("init"))
        return self

    def __exit__(self, *error: object) -> None:
        self._recording.close()

    def loaded(self, model: nn.Module) -> None:
        """The plain model is on the host, and an engine is about to take it."""
        if self._recorder is not None:
            self._recorder.mark(model.parameters(), "parameter")
            self._recorder.mark(model.buffers(), "buffer")

    def watch(self, engine: Engine, ema: Ema | None = None) -> None:
        """From here on the engine's tensors are known by their meaning."""
        if self._recorder is not None:
            self._watch = Watch(self._recorder, engine, ema)

    def held(self, futures: Iterable[Future[list[Batch]]]) -> None:
        """These micro-batches wait on the host. They are read in a thread, whose allocations no recorder sees."""
        if self._watch is not None:
            for future in futures:
                for batch in future.result():
                    self._watch.host_batch(batch)

    @contextmanager
    def step(self, micro_batches: Sequence[Batch]) -> Iterator[tuple[Sequence[Any], Phase]]:
        """Surround one training step: yields the micro-batches and the phases to run it with."""
        if self._steps >= STEPS:
            yield micro_batches, record_function
            return
        if self._watch is None:
            yield micro_batches, record_function
        else:
            yield self._watch.batches(micro_batches), self._watch.phase
        self._steps += 1
        if self._steps == STEPS:
            self._finish()

    def _finish(self) -> None:
        if self._cuda:
            self.peak_allocated_bytes = torch.cuda.max_memory_allocated()
            self.peak_reserved_bytes = torch.cuda.max_memory_reserved()
            return
        assert self._recorder is not None
        assert self._watch is not None
        self._watch.close()
        self._recording.close()
        self.peak_allocated_bytes = self._recorder.timeline().peak_allocated_bytes
        self._recorder = self._watch = None


def memory_now(device: torch.device) -> dict[str, int]:
    """Bytes: `memory_bytes`, and their peak so far. On a GPU those that torch has allocated; else the host's that
    this process holds, which Linux alone tells of as it is now."""
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return {"memory_bytes": now, "peak_memory_bytes": peak}
    unit = 1 if sys.platform == "darwin" else 1024
    peak, pages = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, Path("/proc/self/statm")
    if not pages.exists():
        return {"peak_memory_bytes": peak}
    now = int(pages.read_text().split()[1]) * resource.getpagesize()
    return {"memory_bytes": now, "peak_memory_bytes": max(now, peak)}  # the kernel notes the peak a little later


def _expandable_segments() -> bool:
    """How torch's allocator is set, by whichever of its variables or calls."""
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
