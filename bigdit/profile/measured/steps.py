"""Two steps on a CUDA device, as its own caching allocator tells them.

No dispatch mode watches: autograd adds gradients in place only where there is none, and a trainer has none.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigdit.dist import world_from_env
from bigdit.emulator import on_emulated_card
from bigdit.errors import versions
from bigdit.loader.batch import Batch
from bigdit.loader.raw import RawBatch
from bigdit.memory import Block, Span, Timeline
from bigdit.profile.measured.run import CardPhase, CardRun, Segment
from bigdit.profile.measured.timing import timed
from bigdit.profile.measured.trace import operator
from bigdit.profile.request import StepRequest
from bigdit.profile.steps import STEPS, Witness, Workload, group, prepare, training
from bigdit.profile.unwritten import fill, fill_noise, unwritten_weights

_ALL = 1 << 40
"""More events than any two steps have."""


def run(request: StepRequest, timed_steps: int = 0) -> CardRun:
    """Two steps of `request` on this rank's CUDA device, where it has nothing yet.

    On an emulated card, what engines read of values that no kernel wrote is 0: nothing overflows.
    On a real one `timed_steps` more may be timed.
    """
    began = time.perf_counter()
    strategy = request.strategy
    with unwritten_weights():
        workload = prepare(request.model, request.batch, strategy, request.encoders)
    if not on_emulated_card():
        workload = _filled(workload)
    device = torch.device("cuda", world_from_env().local_rank)
    torch.cuda.set_device(device)
    torch.cuda.init()
    with group(strategy) as world:
        trace = _Trace()
        steps = training(workload, request.objective, device, world, trace)
        if not all(itertools.islice(steps, STEPS)):
            raise RuntimeError("a step was not taken, since its gradients are not finite: no optimizer state was made")
        phases, timeline, segments, deferred = trace.close()
        retries, beside = torch.cuda.memory_stats()["num_alloc_retries"], _beside(device)
        timing = timed(steps, timed_steps) if timed_steps else None
    return CardRun(
        device=torch.cuda.get_device_name(device),
        params=workload.params,
        phases=phases,
        packed_timeline=timeline.pack(),
        segments=segments,
        deferred=deferred,
        alloc_retries=retries,
        beside_bytes=beside,
        timing=timing,
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        versions=versions(),
        seconds=round(time.perf_counter() - began, 3),
    )


def _filled(workload: Workload) -> Workload:
    """With values that a real card can compute with: of zeros alone gradients have no end, and they cost less power."""
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


class _Trace(Witness):
    """The allocator's counters and its history, phase by phase.

    A border lies between two events: the counters say how many there were. Garbage is collected there as the
    recorder does it, since it frees what lay in cycles.
    """

    def __init__(self) -> None:
        self._phases: list[CardPhase] = []
        self._spans: list[tuple[str, int]] = []
        self._closed = False
        # Symbols as the dynamic linker knows them: operators are among those, and lines would take minutes.
        os.environ["TORCH_SYMBOLIZE_MODE"] = "dladdr"
        torch.cuda.memory._record_memory_history(max_entries=_ALL, context="alloc", stacks="all")
        self._before = self._count()
        gc.disable()
        gc.collect()
        gc.freeze()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._closed:
            yield
            return
        self._end()
        torch.cuda.reset_peak_memory_stats()
        self._spans.append((name, self._count() - self._before))
        yield
        gc.collect()

    def close(self) -> tuple[tuple[CardPhase, ...], Timeline, tuple[Segment, ...], int]:
        """The phases, the events, the segments, and how many frees were deferred. Steps go on without a trace."""
        gc.collect()
        self._end()
        stop = self._count() - self._before
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        gc.enable()
        self._closed = True
        blocks, events, segments, deferred = _read(trace)
        if len(events) != stop:
            raise RuntimeError(f"the allocator counted {stop} events, and its history has {len(events)}")
        starts = [start for _, start in self._spans]
        spans = tuple(
            Span(name, start, end) for (name, start), end in zip(self._spans, [*starts[1:], stop], strict=True)
        )
        timeline = Timeline(tuple(blocks), tuple(events), spans)
        return tuple(self._phases), timeline, tuple(segments), deferred

    def _count(self) -> int:
        """Blocks that torch was given so far, and those that it has freed."""
        stats = torch.cuda.memory_stats()
        return int(stats["allocation.all.allocated"] + stats["allocation.all.freed"])

    def _end(self) -> None:
        if len(self._phases) == len(self._spans):
            return  # before the first one
        stats = torch.cuda.memory_stats()
        self._phases.append(
            CardPhase(
                phase=self._spans[-1][0],
                peak_allocated_bytes=stats["allocated_bytes.all.peak"],
                peak_reserved_bytes=stats["reserved_bytes.all.peak"],
            )
        )


def _read(trace: list[dict[str, Any]]) -> tuple[list[Block], list[int], list[Segment], int]:
    """Blocks, events, segments and deferred frees of a device's history."""
    blocks: list[Block] = []
    events: list[int] = []
    segments: list[Segment] = []
    live: dict[int, int] = {}
    asked: int | None = None
    deferred = 0
    for entry in trace:
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            blocks.append(Block(entry["size"], "temporary", operator(entry.get("frames", ()))))
            live[address] = len(blocks)
            events.append(len(blocks))
        elif action == "free_requested":
            events.append(-live.pop(address))
            deferred += 1
        elif action == "free_completed":
            deferred -= asked == address  # at once
        elif action.startswith("segment_"):
            taken = action in ("segment_alloc", "segment_map")
            segments.append(Segment(at=len(events), nbytes=entry["size"] if taken else -entry["size"]))
        asked = address if action == "free_requested" else None
    return blocks, events, segments, deferred


def _beside(device: torch.device) -> int | None:
    free, total = torch.cuda.mem_get_info(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    return beside if beside >= 0 else None
