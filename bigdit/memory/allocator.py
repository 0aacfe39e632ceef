"""A timeline through PyTorch's caching allocator on a card of so many bytes: does it fit, and what is reserved."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from bigdit.memory.caching import Block, CachingAllocator, Device, OnChange, OutOfMemory
from bigdit.memory.segments import ExpandableSegments, WholeSegments
from bigdit.memory.timeline import Category, Timeline
from bigdit.spec import Strict


class Failure(Strict):
    """The allocation that the card had no room for, at `event` of the timeline, and what was there then.

    `asked_bytes` as torch asked for them; `reserved_bytes` is what was left after the caches were emptied.
    """

    event: NonNegativeInt
    phase: str
    category: Category
    label: str
    asked_bytes: PositiveInt
    allocated_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt
    capacity_bytes: NonNegativeInt

    @property
    def free_bytes(self) -> int:
        """What the card had left."""
        return self.capacity_bytes - self.reserved_bytes


class PhaseReserved(Strict):
    """The most that was reserved during one phase, over all its occurrences."""

    phase: str
    peak_reserved_bytes: NonNegativeInt


class Replay(Strict):
    """What the allocator held over a timeline, or up to the allocation that failed.

    `peak_allocated_bytes` counts whole blocks: what rounding to 512 B adds, and what is kept because too little
    would have been split off. `idle_bytes` was reserved and in no block when the reserved peak was first reached:
    free, but in pieces that did not fit. `cache_flushes` counts the times that the caches were emptied to make room,
    for which the whole card waits.
    """

    capacity_bytes: NonNegativeInt
    expandable_segments: bool
    peak_reserved_bytes: NonNegativeInt
    peak_allocated_bytes: NonNegativeInt
    idle_bytes: NonNegativeInt
    phases: tuple[PhaseReserved, ...]
    cache_flushes: NonNegativeInt
    failure: Failure | None

    @property
    def fits(self) -> bool:
        return self.failure is None

    @property
    def fragmentation(self) -> float:
        """The share of the reserved peak that was idle, 0 to 1."""
        return self.idle_bytes / self.peak_reserved_bytes if self.peak_reserved_bytes else 0.0

    def phase(self, name: str) -> PhaseReserved:
        """The phase `name`. Raises KeyError where the replay did not come to it."""
        for phase in self.phases:
            if phase.phase == name:
                return phase
        raise KeyError(name)


class Playback:
    """A timeline's events, done one by one with a caching allocator. `on_change` and `card_bytes` are the `Device`'s.

    `live` are the blocks in use, by their event of allocation.
    """

    def __init__(
        self,
        timeline: Timeline,
        capacity_bytes: int,
        *,
        expandable_segments: bool = False,
        on_change: OnChange | None = None,
        card_bytes: int | None = None,
    ) -> None:
        self._timeline = timeline
        self._emptied = frozenset(timeline.emptied)
        self.live: dict[int, Block] = {}
        self.device = Device(capacity_bytes, on_change, card_bytes=card_bytes)
        self.allocator = CachingAllocator((ExpandableSegments if expandable_segments else WholeSegments)(self.device))

    def step(self, at: int) -> Block | None:
        """Do event `at`; the block that it allocated or freed, None for one of no bytes. Raises OutOfMemory."""
        if at in self._emptied:
            self.allocator.empty_cache()
        event = self._timeline.events[at]
        if event < 0:
            block = self.live.pop(-event, None)
            if block is not None:
                self.allocator.free(block)
            return block
        asked = self._timeline.blocks[event - 1]
        if not asked.nbytes:  # torch asks its allocator for nothing then
            return None
        self.live[event] = self.allocator.malloc(asked.nbytes, asked.stream)
        return self.live[event]


def replay(
    timeline: Timeline, capacity_bytes: int, *, expandable_segments: bool = False, card_bytes: int | None = None
) -> Replay:
    """Allocate and free what `timeline` does, until it ends or an allocation fails.

    `capacity_bytes` is what the card leaves for torch: its usable bytes less what the process takes beside the
    allocator (`process.beside_torch`). `card_bytes` are the usable ones, where `capacity_bytes` are not.
    """
    playback = Playback(timeline, capacity_bytes, expandable_segments=expandable_segments, card_bytes=card_bytes)
    device, allocator = playback.device, playback.allocator
    phases: dict[str, int] = {}
    peak_allocated = peak_reserved = idle = 0
    failure = None
    for span in timeline.spans:
        device.reset_peak()
        for at in range(span.start, span.stop):
            try:
                playback.step(at)
            except OutOfMemory:
                failure = _failure(timeline, at, span.phase, playback)
            peak_allocated = max(peak_allocated, allocator.allocated_bytes)
            if device.reserved_bytes > peak_reserved:
                peak_reserved = device.reserved_bytes
                idle = peak_reserved - allocator.allocated_bytes
            if failure:
                break
        phases[span.phase] = max(device.peak_reserved_bytes, phases.get(span.phase, 0))
        if failure:
            break
    return Replay(
        capacity_bytes=capacity_bytes,
        expandable_segments=expandable_segments,
        peak_reserved_bytes=max(phases.values(), default=0),
        peak_allocated_bytes=peak_allocated,
        idle_bytes=idle,
        phases=tuple(PhaseReserved(phase=name, peak_reserved_bytes=peak) for name, peak in phases.items()),
        cache_flushes=allocator.cache_flushes,
        failure=failure,
    )


def _failure(timeline: Timeline, at: int, phase: str, playback: Playback) -> Failure:
    asked = timeline.blocks[timeline.events[at] - 1]
    return Failure(
        event=at,
        phase=phase,
        category=asked.category,
        label=asked.label,
        asked_bytes=asked.nbytes,
        allocated_bytes=playback.allocator.allocated_bytes,
        reserved_bytes=playback.device.reserved_bytes,
        capacity_bytes=playback.device.capacity_bytes,
    )
