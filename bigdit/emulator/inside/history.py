"""The allocator's own history of this process, and where its phases lie in it.

torch's peak counters are never reset here: scripts print them. A script that records a history itself keeps its own.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from . import ending, notices, parent, replay

_FOLD = 300_000
"""Events kept at most, about: what is older is summed up, or a long run would fill the host."""

cards: dict[int, replay.Replay] = {}
reset_peaks: dict[int, replay.Peak] = {}
"""Peaks that the script reset, by card."""
when_begun: list[Callable[[], None]] = []
"""What else is to be put in where CUDA is initialised, with torch's own allocator."""

_began = False
_recording = False
_theirs = False  # the script has taken the history for itself
_torch: Any = None
_originals: dict[str, Callable[..., Any]] = {}
_offsets: dict[int, tuple[int, int]] = {}  # allocations and frees that the script reset, by card


def install(torch: Any) -> None:
    """Record from the moment that CUDA is initialised."""
    global _torch
    _torch = torch
    torch.cuda._lazy_call(_begin)
    ending.note_crowd(torch.cuda.device_count())
    _keep_what_scripts_reset(torch)
    record = _originals["record"] = torch.cuda.memory._record_memory_history

    def by_the_script(*args: Any, **kwargs: Any) -> Any:
        global _recording, _theirs
        fold()
        _recording, _theirs = False, True
        notices.add("the script records the allocator's history itself: phases and lines are known up to there")
        return record(*args, **kwargs)

    torch.cuda.memory._record_memory_history = by_the_script


def _begin() -> None:
    global _began, _recording
    _began = True
    ending.begin()
    if _torch.cuda.get_allocator_backend() != "native":
        notices.add("the script chose another allocator than torch's own, which keeps no history: no phases, no lines")
        return
    for begin in when_begun:
        begin()
    if not _theirs:
        _recording = True
        _record(clear=False)


def _record(*, clear: bool) -> None:
    _originals["record"]("all", context="alloc", stacks="python", max_entries=sys.maxsize, clear_history=clear)


def used() -> bool:
    """Whether this process has touched a card."""
    return _torch is not None and _torch.cuda.is_initialized()


def stats(card: int) -> dict[str, Any]:
    """torch's own counters, nested, as torch._C has them; empty for a card that was not used."""
    found: dict[str, Any] = _torch._C._cuda_memoryStats(card) if used() else {}
    return found


def mark(phase: str, place: dict[str, Any] | None) -> None:
    """A phase begins here."""
    if not _recording:
        return
    events = 0
    for card in range(_torch.cuda.device_count()):
        found = stats(card)
        if not found or not (found["reserved_bytes"]["all"]["peak"] or card in cards):
            continue
        before = _offsets.get(card, (0, 0))
        allocations = found["allocation"]["all"]["allocated"] + before[0]
        frees = found["allocation"]["all"]["freed"] + before[1]
        allocated, reserved = (found[name]["all"]["current"] for name in ("allocated_bytes", "reserved_bytes"))
        known = cards.setdefault(card, replay.Replay())
        known.marks.append(replay.Mark(phase, allocations, frees, allocated, reserved, place))
        events = max(events, allocations + frees - known.allocations - known.frees)
    if events > _FOLD:
        fold()
        _record(clear=True)
        if parent.SNAPSHOT:
            notices.add("the run is long: the snapshot for memory_viz has only its end")


def fold(*, snapshot: str = "") -> None:
    """Replay what the history holds; write it to a file of that name too."""
    if not _recording:
        return
    found = _torch._C._cuda_memorySnapshot(None)
    for card, events in enumerate(found["device_traces"]):
        if any(event["action"] != "snapshot" for event in events):  # which torch notes of cards that nobody used too
            cards.setdefault(card, replay.Replay()).feed(events)
    if snapshot and parent.SNAPSHOT:
        parent.write(snapshot, pickle.dumps(found, protocol=4))


def forget() -> None:
    global _began, _recording
    if _began:  # else it still waits for this process's own first use
        _torch.cuda._lazy_call(_begin)
    _began = _recording = False
    cards.clear()
    reset_peaks.clear()
    _offsets.clear()


def _keep_what_scripts_reset(torch: Any) -> None:
    reset_peak, reset_counts = torch._C._cuda_resetPeakMemoryStats, torch._C._cuda_resetAccumulatedMemoryStats

    def peak(card: int) -> Any:
        found = stats(card)
        if found:
            highest = (found[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes"))
            reset_peaks.setdefault(card, replay.Peak()).rise(*highest)
        return reset_peak(card)

    def counts(card: int) -> Any:
        found = stats(card)
        if found:
            before, now = _offsets.get(card, (0, 0)), found["allocation"]["all"]
            _offsets[card] = (before[0] + now["allocated"], before[1] + now["freed"])
        return reset_counts(card)

    torch._C._cuda_resetPeakMemoryStats, torch._C._cuda_resetAccumulatedMemoryStats = peak, counts
