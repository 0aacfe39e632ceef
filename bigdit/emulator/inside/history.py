"""Records the allocator's history of this process, and marks phases in it.

torch's peak counters are never reset here, since scripts print them. A script that records a history itself keeps it.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from . import ending, notices, parent, replay

_FOLD = 300_000
"""About the most events in memory. Older ones are summed up, since a long run would fill CPU memory."""

gpus: dict[int, replay.Replay] = {}
reset_peaks: dict[int, replay.Peak] = {}
"""Peaks before the script reset them, by GPU."""
when_begun: list[Callable[[], None]] = []
"""Called when CUDA is initialised with torch's own allocator."""

_began = False
_recording = False
_theirs = False  # the script records the history itself
_torch: Any = None
_originals: dict[str, Callable[..., Any]] = {}
_offsets: dict[int, tuple[int, int]] = {}  # allocations and frees before the script reset them, by GPU


def install(torch: Any) -> None:
    """Record from the initialisation of CUDA on."""
    global _torch
    _torch = torch
    torch.cuda._lazy_call(_begin)
    ending.note_crowd(torch.cuda.device_count())
    _keep_reset_counters(torch)
    record = _originals["record"] = torch.cuda.memory._record_memory_history

    def by_the_script(*args: Any, **kwargs: Any) -> Any:
        global _recording, _theirs
        fold()
        _recording, _theirs = False, True
        notices.add("the script records the allocator's history itself: phases and lines are known only until then")
        return record(*args, **kwargs)

    torch.cuda.memory._record_memory_history = by_the_script


def _begin() -> None:
    global _began, _recording
    _began = True
    ending.begin()
    if _torch.cuda.get_allocator_backend() != "native":
        notices.add("the script chose another allocator than torch's own, which has no history: no phases, no lines")
        return
    for begin in when_begun:
        begin()
    if not _theirs:
        _recording = True
        _record(clear=False)


def _record(*, clear: bool) -> None:
    _originals["record"]("all", context="alloc", stacks="python", max_entries=sys.maxsize, clear_history=clear)


def used() -> bool:
    """Whether this process has touched a GPU."""
    return _torch is not None and _torch.cuda.is_initialized()


def stats(gpu: int) -> dict[str, Any]:
    """torch's own counters, nested as in torch._C; empty for an unused GPU."""
    found: dict[str, Any] = _torch._C._cuda_memoryStats(gpu) if used() else {}
    return found


def mark(phase: str, place: dict[str, Any] | None) -> None:
    """A phase begins here."""
    if not _recording:
        return
    events = 0
    for gpu in range(_torch.cuda.device_count()):
        found = stats(gpu)
        if not found or not (found["reserved_bytes"]["all"]["peak"] or gpu in gpus):
            continue
        before = _offsets.get(gpu, (0, 0))
        allocations = found["allocation"]["all"]["allocated"] + before[0]
        frees = found["allocation"]["all"]["freed"] + before[1]
        allocated, reserved = (found[name]["all"]["current"] for name in ("allocated_bytes", "reserved_bytes"))
        known = gpus.setdefault(gpu, replay.Replay())
        known.marks.append(replay.Mark(phase, allocations, frees, allocated, reserved, place))
        events = max(events, allocations + frees - known.allocations - known.frees)
    if events > _FOLD:
        fold()
        _record(clear=True)
        if parent.SNAPSHOT:
            notices.add("the run is long, so the snapshot for memory_viz has only its end")


def fold(*, snapshot: str = "") -> None:
    """Replay the recorded history. With `snapshot`, write it to a file of this name too."""
    if not _recording:
        return
    found = _torch._C._cuda_memorySnapshot(None)
    for gpu, events in enumerate(found["device_traces"]):
        if any(event["action"] != "snapshot" for event in events):  # torch adds "snapshot" to unused GPUs too
            gpus.setdefault(gpu, replay.Replay()).feed(events)
    if snapshot and parent.SNAPSHOT:
        parent.write(snapshot, pickle.dumps(found, protocol=4))


def forget() -> None:
    global _began, _recording
    if _began:  # else _begin is still queued
        _torch.cuda._lazy_call(_begin)
    _began = _recording = False
    gpus.clear()
    reset_peaks.clear()
    _offsets.clear()


def _keep_reset_counters(torch: Any) -> None:
    """Remember torch's counters when the script resets them."""
    reset_peak, reset_counts = torch._C._cuda_resetPeakMemoryStats, torch._C._cuda_resetAccumulatedMemoryStats

    def peak(gpu: int) -> Any:
        found = stats(gpu)
        if found:
            highest = (found[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes"))
            reset_peaks.setdefault(gpu, replay.Peak()).rise(*highest)
        return reset_peak(gpu)

    def counts(gpu: int) -> Any:
        found = stats(gpu)
        if found:
            before, now = _offsets.get(gpu, (0, 0)), found["allocation"]["all"]
            _offsets[gpu] = (before[0] + now["allocated"], before[1] + now["freed"])
        return reset_counts(gpu)

    torch._C._cuda_resetPeakMemoryStats, torch._C._cuda_resetAccumulatedMemoryStats = peak, counts
