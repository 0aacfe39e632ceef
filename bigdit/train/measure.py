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
from bigdit.loader.stream import Micro
from bigdit.memory import ledger
from bigdit.record import Recorder, Watch
from bigdit.train.record import MeasuredMemory, PhaseMemory
from bigdit.train.step import Phase

STEPS = 2  # optimizer state appears in the first one


class MemoryMeter:
    """The peak of allocated (on a GPU, reserved) bytes from the engine's start through the first two steps, by phase.

    On a GPU the caching allocator counts. A CPU's allocator does not, so the recorder of the rehearsal tracks
    the real tensors, and is taken off after the second step since it slows every operation.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._recorder = None if self._cuda else Recorder("cpu")
        self._recording = ExitStack()
        self._watch: Watch | None = None
        self._steps = 0
        self._peaks = CardPeaks()
        self.measured: MeasuredMemory | None = None
        self.emulated = self._cuda and on_emulated_card()
        self.expandable_segments = self._cuda and _expandable_segments()
        self.device_name = torch.cuda.get_device_name(device) if self._cuda else "cpu"
        self.compute_capability = torch.cuda.get_device_capability(device) if self._cuda else None
        self.method = "torch.cuda.max_memory_allocated" if self._cuda else "storages of the first two steps"

    def __enter__(self) -> MemoryMeter:
        if self._cuda:
            self._peaks.begin("init")
        else:
            assert self._recorder is not None
            self._recording.enter_context(self._recorder)
            self._recording.enter_context(self._recorder.phase("init"))
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        """Take off what watches: after the second step, or where a run ends before it."""
        if self._watch is not None:
            self._watch.close()
        self._recording.close()
        self._recorder = self._watch = None

    def loaded(self, model: nn.Module, encoders: Iterable[torch.Tensor] = ()) -> None:
        """The plain model is on the host, and an engine is about to take it; encoders are on the device."""
        if self._recorder is not None:
            self._recorder.mark(encoders, "encoder")
            self._recorder.mark(model.parameters(), "parameter")
            self._recorder.mark(model.buffers(), "buffer")

    def watch(self, engine: Engine, ema: Ema | None = None) -> None:
        """From here on the engine's tensors are known by their meaning."""
        if self._recorder is not None:
            self._watch = Watch(self._recorder, engine, ema)

    def held(self, futures: Iterable[Future[list[Micro]]]) -> None:
        """These micro-batches wait on the host. They are read in a thread, whose allocations no recorder sees."""
        if self._watch is not None:
            for future in futures:
                for batch in future.result():
                    self._watch.host_batch(batch)

    @contextmanager
    def step(self, micro_batches: Sequence[Micro]) -> Iterator[tuple[Sequence[Any], Phase]]:
        """Surround one training step: yields the micro-batches and the phases to run it with."""
        if self._steps >= STEPS:
            yield micro_batches, record_function
            return
        if self._cuda:
            yield micro_batches, self._peaks.phase
        else:
            assert self._watch is not None
            yield self._watch.batches(micro_batches), self._watch.phase
        self._steps += 1
        if self._steps == STEPS:
            self._finish()

    def _finish(self) -> None:
        if self._cuda:
            self._peaks.end()
            phases = self._peaks.found
            allocated, reserved = self._peaks.allocated_bytes, self._peaks.reserved_bytes
        else:
            recorder = self._recorder
            assert recorder is not None
            self._close()
            found = ledger(recorder.timeline(), granularity=1)
            phases = [PhaseMemory(phase=each.phase, allocated_bytes=each.peak_bytes) for each in found.phases]
            allocated, reserved = found.peak_allocated_bytes, None
        self.measured = MeasuredMemory(
            method=self.method,
            steps=STEPS,
            phases=tuple(phases),
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
        )

    @property
    def peak_allocated_bytes(self) -> int | None:
        """None until it is measured."""
        return None if self.measured is None else self.measured.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int | None:
        """None until it is measured, and on a CPU."""
        return None if self.measured is None else self.measured.peak_reserved_bytes

    def now(self) -> dict[str, int]:
        """Bytes: `memory_bytes`, and their peak so far. On a GPU those that torch has allocated since the engine's
        start; else the host's."""
        if not self._cuda:
            return host_now()
        highest = max(self._peaks.allocated_bytes, torch.cuda.max_memory_allocated())
        return {"memory_bytes": torch.cuda.memory_allocated(), "peak_memory_bytes": highest}


class CardPeaks:
    """The peaks of phases on a card, and those of all: CUDA's counter, which knows one, starts anew with each phase."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._found: dict[str, tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens from here until the next phase begins belongs to `name`."""
        self.begin(name)
        with record_function(name):
            yield

    def begin(self, name: str) -> None:
        """Without an end: what follows belongs to `name`."""
        self.end()
        self._phase = name
        torch.cuda.reset_peak_memory_stats()

    def end(self) -> None:
        """The last phase is over; from here on the counter goes on."""
        if self._phase is not None:
            before = self._found.get(self._phase, (0, 0))
            now = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self._found[self._phase] = max(before[0], now[0]), max(before[1], now[1])
            self._phase = None

    @property
    def found(self) -> list[PhaseMemory]:
        """The phases that have ended, in the order in which they came first."""
        return [
            PhaseMemory(phase=phase, allocated_bytes=allocated, reserved_bytes=reserved)
            for phase, (allocated, reserved) in self._found.items()
        ]

    @property
    def allocated_bytes(self) -> int:
        """The highest of the phases that have ended."""
        return max((allocated for allocated, _ in self._found.values()), default=0)

    @property
    def reserved_bytes(self) -> int:
        """Likewise."""
        return max((reserved for _, reserved in self._found.values()), default=0)


def host_now() -> dict[str, int]:
    """`memory_bytes` that this process holds, which Linux alone tells of as it is now, and their peak so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak, pages = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, Path("/proc/self/statm")
    if not pages.exists():
        return {"peak_memory_bytes": peak}
    now = int(pages.read_text().split()[1]) * resource.getpagesize()
    return {"memory_bytes": now, "peak_memory_bytes": max(now, peak)}  # the kernel notes the peak a little later


def _expandable_segments() -> bool:
    """How torch's allocator is set, by whichever of its variables or calls."""
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
