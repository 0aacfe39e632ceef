"""The caching allocator: what holds for every trace, and for every card."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import CAPACITIES, MIB, ROOMY, allocator, timelines

from bigdit.memory import Timeline, rounded
from bigdit.memory.allocator import Playback, replay
from bigdit.memory.caching import OutOfMemory


@given(timelines(), CAPACITIES, st.booleans())
def test_at_each_event_blocks_lie_apart_within_what_is_reserved_within_the_card(
    trace: Timeline, capacity: int, expandable: bool
) -> None:
    playback = Playback(trace, capacity, expandable_segments=expandable)
    live = {}
    for at, event in enumerate(trace.events):
        try:
            block = playback.step(at)
        except OutOfMemory:
            block = None
        if block is None:
            continue
        live[abs(event)] = block
        if event < 0:
            del live[-event]
        else:
            assert block.size >= trace.blocks[event - 1].nbytes
        assert playback.allocator.allocated_bytes == sum(block.size for block in live.values())
        assert playback.allocator.allocated_bytes <= playback.device.reserved_bytes <= capacity
    ends = sorted((block.address, block.address + block.size) for block in live.values())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends))


@given(timelines(), st.booleans())
def test_a_card_that_holds_the_peak_changes_nothing(trace: Timeline, expandable: bool) -> None:
    free = replay(trace, ROOMY, expandable_segments=expandable)
    assert free.fits
    assert free.cache_flushes == 0
    exact = replay(trace, free.peak_reserved_bytes, expandable_segments=expandable)
    assert exact == free.model_copy(update={"capacity_bytes": free.peak_reserved_bytes})
    assert exact == replay(trace, free.peak_reserved_bytes, expandable_segments=expandable)
    live = sum(rounded(block.nbytes, 512) for block in trace.blocks)
    assert free.peak_allocated_bytes <= free.peak_reserved_bytes
    assert expandable is False or free.peak_allocated_bytes <= live
    assert max((phase.peak_reserved_bytes for phase in free.phases), default=0) == free.peak_reserved_bytes


@given(timelines(), CAPACITIES, st.booleans())
def test_a_failure_says_that_its_bytes_did_not_fit(trace: Timeline, capacity: int, expandable: bool) -> None:
    failure = replay(trace, capacity, expandable_segments=expandable).failure
    if failure is None:
        return
    # What it needed from the card, at most: its own size in whole pages or segments.
    assert failure.free_bytes < (rounded(failure.asked_bytes, 20 * MIB) if failure.asked_bytes > MIB else 2 * MIB)
    assert failure.asked_bytes == trace.blocks[trace.events[failure.event] - 1].nbytes


@given(st.lists(st.integers(MIB + 1, 60 * MIB), min_size=1, max_size=20), st.randoms())
def test_when_all_is_freed_the_next_large_block_fits_what_was_reserved(sizes: list[int], random) -> None:
    for expandable in (False, True):
        cache, device = allocator(expandable=expandable)
        blocks = [cache.malloc(size) for size in sizes]
        random.shuffle(blocks)
        for block in blocks:
            cache.free(block)
        reserved = device.reserved_bytes
        # Expandable segments have become one block again; of whole ones, each.
        cache.malloc(reserved if expandable else max(sizes))
        assert device.reserved_bytes == reserved


@given(timelines(), CAPACITIES)
def test_whole_segments_are_as_a_plain_search_finds_them(trace: Timeline, capacity: int) -> None:
    playback, plain = Playback(trace, capacity), PlainAllocator(capacity)
    for at, event in enumerate(trace.events):
        block = trace.blocks[abs(event) - 1]
        if not block.nbytes:
            continue
        if event > 0:
            fits = plain.malloc(event, rounded(block.nbytes, 512), block.stream)
            if not fits:
                with pytest.raises(OutOfMemory):
                    playback.step(at)
                return
            playback.step(at)
        else:
            playback.step(at)
            plain.free(-event)
        assert playback.device.reserved_bytes == sum(map(plain.size, plain.segments))


class PlainAllocator:
    """The rules for whole segments once more, as lists: a segment is [stream, [size, block or 0], ...]."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.segments: list[list] = []

    @staticmethod
    def size(segment: list) -> int:
        return sum(size for size, _ in segment[1:])

    def malloc(self, number: int, size: int, stream: int) -> bool:
        small = size <= MIB
        free = [
            (part[0], order, place)
            for order, segment in enumerate(self.segments)
            for place, part in enumerate(segment)
            if segment[0] == (stream, small) and place and not part[1] and part[0] >= size
        ]
        if not free:
            own = rounded(size, 2 * MIB)
            nbytes = 2 * MIB if small else 20 * MIB if size < 10 * MIB else own
            if sum(map(self.size, self.segments)) + nbytes > self.capacity:
                self.segments = [segment for segment in self.segments if any(part[1] for part in segment[1:])]
            if sum(map(self.size, self.segments)) + nbytes > self.capacity:
                return False
            self.segments.append([(stream, small), [nbytes, 0]])
            free = [(nbytes, len(self.segments) - 1, 1)]
        found, order, place = min(free)
        rest = found - size
        if rest >= 512 if small else rest > MIB:
            self.segments[order][place : place + 1] = [[size, number], [rest, 0]]
        else:
            self.segments[order][place][1] = number
        return True

    def free(self, number: int) -> None:
        for segment in self.segments:
            for part in segment[1:]:
                if part[1] == number:
                    part[1] = 0
            joined = segment[:1]
            for part in segment[1:]:
                if len(joined) > 1 and not part[1] and not joined[-1][1]:
                    joined[-1][0] += part[0]
                else:
                    joined.append(part)
            segment[:] = joined
