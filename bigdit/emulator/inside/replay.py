"""Replays the allocator's history of one GPU: bytes after each event, the peak of each phase, and the tensors then.

The history has requested bytes, but the allocator hands out blocks. So blocks are followed here as the allocator splits
and joins them, by their addresses. The totals are the allocator's own.

Source: round_size, should_split, free_block and try_merge_blocks in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SMALL_SIZE, MIN_BLOCK = 2**20, 512
"""kSmallSize and kMinBlockSize of c10/core/AllocatorConfig.h."""

POINTS = 2000
"""The most points of a curve. The highest of each stretch stay."""

Event = dict[str, Any]


class Tensor(NamedTuple):
    """An allocated tensor: its block's bytes, the stack that made it, and the number of the mark before it."""

    nbytes: int
    frames: Sequence[dict[str, Any]]
    mark: int


class Mark(NamedTuple):
    """The begin of a phase: the allocations, frees, and torch's bytes before it."""

    phase: str
    allocations: int
    frees: int
    allocated_bytes: int
    reserved_bytes: int
    place: dict[str, Any] | None  # the script's line


@dataclass
class Peak:
    allocated_bytes: int = 0
    reserved_bytes: int = 0

    def rise(self, allocated: int, reserved: int) -> None:
        self.allocated_bytes = max(self.allocated_bytes, allocated)
        self.reserved_bytes = max(self.reserved_bytes, reserved)


@dataclass
class Blocks:
    """The allocator's segments, cut into blocks. `size` by address; `used`: the addresses of allocated blocks."""

    size: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)  # from a block's end to its begin
    heads: dict[int, int] = field(default_factory=dict)  # of whole segments: bytes by address
    mapped: set[int] = field(default_factory=set)  # addresses of blocks in expandable segments
    used: set[int] = field(default_factory=set)

    def add(self, address: int, nbytes: int, *, expandable: bool) -> None:
        if expandable:
            self.mapped.add(address)
        else:
            self.heads[address] = nbytes
        self._put(address, nbytes)
        if expandable:
            self._join(address)

    def remove(self, address: int, nbytes: int) -> None:
        """Free a segment, or a stretch of an expandable one. Free bytes around it stay."""
        self.heads.pop(address, None)
        start = address if address in self.size else None
        if start is None:  # within a free block
            start = next((at for at, size in self.size.items() if at < address < at + size), None)
        if start is None:
            return
        size = self._take(start)
        expandable = start in self.mapped
        self.mapped.discard(start)
        for at, rest in ((start, address - start), (address + nbytes, start + size - address - nbytes)):
            if rest > 0:
                self._put(at, rest)
                if expandable:
                    self.mapped.add(at)

    def allocate(self, address: int, asked: int) -> int:
        """Allocate at `address`; returns the bytes of the block."""
        rounded = max(MIN_BLOCK, -(-asked // MIN_BLOCK) * MIN_BLOCK)
        whole = self.size.get(address, rounded)
        rest = whole - rounded
        small = rounded <= SMALL_SIZE
        split = rest >= MIN_BLOCK if small or address in self.mapped else rest > SMALL_SIZE
        if split:
            self._take(address)
            self._put(address, rounded)
            self._put(address + rounded, rest)
            if address in self.mapped:
                self.mapped.add(address + rounded)
        self.used.add(address)
        return rounded if split else whole

    def free(self, address: int) -> None:
        self.used.discard(address)
        if address in self.size:
            self._join(address)

    def _put(self, address: int, nbytes: int) -> None:
        self.size[address] = nbytes
        self.ends[address + nbytes] = address

    def _take(self, address: int) -> int:
        nbytes = self.size.pop(address)
        del self.ends[address + nbytes]
        return nbytes

    def _join(self, address: int) -> None:
        """Merge a free block with free neighbours in its segment."""
        before = self.ends.get(address)
        if before is not None and address not in self.heads and self._alike(before, address):
            self._merge(before, address)
            address = before
        after = address + self.size[address]
        if after in self.size and after not in self.heads and self._alike(address, after):
            self._merge(address, after)

    def _alike(self, one: int, other: int) -> bool:
        free = one not in self.used and other not in self.used
        return free and (one in self.mapped) == (other in self.mapped)

    def _merge(self, first: int, second: int) -> None:
        nbytes = self._take(first) + self._take(second)
        self.mapped.discard(second)
        self._put(first, nbytes)


@dataclass
class Replay:
    """The state of a GPU after the events so far, and its peaks."""

    marks: list[Mark] = field(default_factory=list)
    blocks: Blocks = field(default_factory=Blocks)
    live: dict[int, Tensor] = field(default_factory=dict)
    allocations: int = 0
    frees: int = 0
    events: int = 0
    allocated: int = 0
    reserved: int = 0
    peak: Peak = field(default_factory=Peak)
    phases: dict[str, Peak] = field(default_factory=dict)
    spans: list[tuple[str, int]] = field(default_factory=list)  # phase, number of its first event
    curve: list[tuple[int, int, int]] = field(default_factory=list)  # event, allocated, reserved
    at_peak: list[Tensor] = field(default_factory=list)
    peak_event: int = 0
    peak_phase: str = "start"
    ooms: list[list[Tensor]] = field(default_factory=list)  # the tensors at each
    off_bytes: int = 0  # the largest difference to torch's own figure at a mark
    _mark: int = -1

    @property
    def phase(self) -> str:
        return self.marks[self._mark].phase if self._mark >= 0 else "start"

    def __post_init__(self) -> None:
        self._note()

    def feed(self, events: Sequence[Event]) -> None:
        """Replay further events, with the `marks` that were appended before."""
        before, start, highest = dict(self.live), self.events, self.peak.allocated_bytes
        made: list[Tensor] = []
        for event in events:
            self._pass_marks()
            self._step(event, made)
        self._pass_marks()
        if self.peak.allocated_bytes > highest:
            self.at_peak = _live_after(events[: self.peak_event - start], before, iter(made))
        if len(self.curve) > 20 * POINTS:
            self.curve = thin(self.curve)

    def _step(self, event: Event, made: list[Tensor]) -> None:
        action, address, nbytes = event["action"], event.get("addr", 0), event["size"]
        self.events += 1
        if action == "alloc":
            tensor = Tensor(self.blocks.allocate(address, nbytes), event["frames"], self._mark)
            self.live[address] = tensor
            made.append(tensor)
            self.allocations += 1
            self.allocated += tensor.nbytes
        elif action == "free_requested":
            gone = self.live.pop(address, None)
            self.frees += 1
            self.allocated -= gone.nbytes if gone else 0
        elif action == "free_completed":
            self.blocks.free(address)
        elif action in ("segment_alloc", "segment_map"):
            self.blocks.add(address, nbytes, expandable=action == "segment_map")
            self.reserved += nbytes
        elif action in ("segment_free", "segment_unmap"):
            self.blocks.remove(address, nbytes)
            self.reserved -= nbytes
        elif action == "oom":
            self.ooms.append(list(self.live.values()))
        self._note()

    def _pass_marks(self) -> None:
        while self._mark + 1 < len(self.marks):
            mark = self.marks[self._mark + 1]
            if self.allocations < mark.allocations or self.frees < mark.frees:
                return
            self._mark += 1
            self.off_bytes = max(self.off_bytes, abs(mark.allocated_bytes - self.allocated))
            if not self.spans or self.spans[-1][0] != mark.phase:
                self.spans.append((mark.phase, self.events))
            self._note()

    def _note(self) -> None:
        if self.allocated > self.peak.allocated_bytes:
            self.peak_event, self.peak_phase = self.events, self.phase
        self.peak.rise(self.allocated, self.reserved)
        self.phases.setdefault(self.phase, Peak()).rise(self.allocated, self.reserved)
        self.curve.append((self.events, self.allocated, self.reserved))


def _live_after(events: Sequence[Event], before: dict[int, Tensor], made: Iterator[Tensor]) -> list[Tensor]:
    live = before
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = next(made)
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    return list(live.values())


def thin(curve: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """At most POINTS of a curve: the highest allocated and the highest reserved of each of equal stretches."""
    if len(curve) <= POINTS:
        return list(curve)
    stretches = POINTS // 2 - 1
    kept = {0, len(curve) - 1}
    for at in range(stretches):
        start, stop = at * len(curve) // stretches, (at + 1) * len(curve) // stretches
        kept.add(max(range(start, stop), key=lambda point: curve[point][1]))
        kept.add(max(range(start, stop), key=lambda point: curve[point][2]))
    return [curve[at] for at in sorted(kept)]
