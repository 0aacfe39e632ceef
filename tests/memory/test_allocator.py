"""The caching allocator: each rule on a trace computed by hand from torch's source."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traces import MIB, ROOMY, allocator, timeline

from bigdit.memory.allocator import Playback, Replay, replay


def found(result: Replay) -> tuple[int, int]:
    return result.peak_reserved_bytes, result.peak_allocated_bytes


@pytest.mark.parametrize(
    ("asked", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),  # the smallest block, in a segment of the small pool
        (512, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),  # the largest small block
        (MIB + 1, 20 * MIB, MIB + 512),  # a large one, cut from a shared segment
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),  # from here a segment of its own
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),  # 12 MiB less 10 MiB and 512 is more than 1 MiB: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest is 1 MiB, not more: kept whole
        (19 * MIB - 512, 20 * MIB, 19 * MIB - 512),  # the rest is 1 MiB and 512: split
    ],
)
def test_a_block_takes_a_segment_of_its_class(asked: int, reserved: int, allocated: int) -> None:
    assert found(replay(timeline(asked), ROOMY)) == (reserved, allocated)


def test_small_blocks_share_a_segment_until_it_is_full() -> None:
    # 2 MiB hold 2 × (1 MiB - 512) and 2 × 512; the next 512 need a second segment.
    full = (MIB - 512, MIB - 512, 512, 512)
    assert found(replay(timeline(*full), ROOMY)) == (2 * MIB, 2 * MIB)
    assert found(replay(timeline(*full, 1), ROOMY)) == (4 * MIB, 2 * MIB + 512)


def test_the_smallest_block_that_fits_is_taken_and_split_where_more_than_1_mib_remains() -> None:
    # Segments of 30, 12 and 40 MiB are free. 11 MiB fits the 12 best, and keeps it whole. 13 MiB fits the 30 best,
    # and leaves 17 MiB, which then fit 16 MiB and keep 1 MiB too much.
    trace = timeline(30 * MIB, 12 * MIB, 40 * MIB, -1, -2, -3, 11 * MIB, 13 * MIB, 16 * MIB)
    playback = Playback(trace, ROOMY)
    blocks = [playback.step(at) for at in range(len(trace.events))]
    assert [block.address for block in blocks[6:]] == [
        blocks[1].address,
        blocks[0].address,
        blocks[0].address + 13 * MIB,
    ]
    assert [block.size for block in blocks[6:]] == [12 * MIB, 13 * MIB, 17 * MIB]
    assert playback.device.reserved_bytes == 82 * MIB


def test_of_blocks_of_one_size_the_lowest_address_is_taken() -> None:
    trace = timeline(10 * MIB, 10 * MIB, -2, -1, 10 * MIB)
    playback = Playback(trace, ROOMY)
    first, _, _, _, again = [playback.step(at) for at in range(5)]
    assert again.address == first.address


def test_freed_neighbours_become_one_block() -> None:
    # A segment of 20 MiB holds 5, 5, 5 and a rest of 5. With the second in use the largest free block is the third
    # with the rest, 10 MiB; when that is freed too, all 20.
    parts = (5 * MIB, 5 * MIB, 5 * MIB, -1, -3)
    assert found(replay(timeline(*parts, 9 * MIB), ROOMY)) == (20 * MIB, 15 * MIB)
    assert replay(timeline(*parts, 10 * MIB + 512), ROOMY).peak_reserved_bytes == 20 * MIB + 12 * MIB
    assert found(replay(timeline(*parts, -2, 20 * MIB), ROOMY)) == (20 * MIB, 20 * MIB)


def test_a_freed_block_serves_its_own_stream_alone() -> None:
    assert replay(timeline((30 * MIB, 0), -1, (30 * MIB, 0)), ROOMY).peak_reserved_bytes == 30 * MIB
    assert replay(timeline((30 * MIB, 0), -1, (30 * MIB, 1)), ROOMY).peak_reserved_bytes == 60 * MIB


def test_small_and_large_blocks_do_not_share() -> None:
    # 30 MiB are free, and 1 MiB takes a segment of the small pool all the same.
    assert replay(timeline(30 * MIB, -1, MIB), ROOMY).peak_reserved_bytes == 32 * MIB


def test_more_than_the_card_has_fails_at_once() -> None:
    for expandable in (False, True):
        for capacity in (0, 1, 2 * MIB, 100 * MIB):
            failure = replay(timeline(100 * MIB + 1), capacity, expandable_segments=expandable).failure
            assert (failure.asked_bytes, failure.reserved_bytes, failure.capacity_bytes) == (100 * MIB + 1, 0, capacity)


def test_nothing_asked_takes_nothing() -> None:
    assert found(replay(timeline(0, -1), 0)) == (0, 0)


def test_a_full_card_gives_free_segments_back_and_tries_again() -> None:
    # 20 MiB and 2 MiB are cached, on different streams; 20 + 2 + 30 do not fit 45 MiB, 30 do.
    result = replay(timeline((20 * MIB, 1), (MIB, 2), -1, -2, 30 * MIB), 45 * MIB)
    assert result.fits
    assert result.cache_flushes == 1
    assert found(result) == (30 * MIB, 30 * MIB)


def test_a_segment_that_a_block_splits_stays_and_memory_runs_out() -> None:
    # 5 + 5 MiB lie in one segment of 20. The first is freed, the second holds the segment: 20 + 22 MiB > 40 MiB.
    trace = timeline(5 * MIB, 5 * MIB, -1, 22 * MIB - 7, phases=(("init", 0), ("forward", 2), ("backward", 3)))
    result = replay(trace, 40 * MIB)
    assert not result.fits
    assert result.cache_flushes == 1
    failure = result.failure
    assert (failure.event, failure.phase, failure.label) == (3, "backward", "block 3")
    assert failure.asked_bytes == 22 * MIB - 7
    assert (failure.reserved_bytes, failure.allocated_bytes, failure.free_bytes) == (20 * MIB, 5 * MIB, 20 * MIB)
    assert [phase.phase for phase in result.phases] == ["init", "forward", "backward"]
    assert replay(trace, 42 * MIB).fits


def test_what_an_engine_gives_back_is_free_for_other_sizes() -> None:
    # 20 MiB are cached and too few for 30: both are reserved, unless the cache is emptied in between.
    trace = timeline(20 * MIB, -1, 30 * MIB)
    assert replay(trace, ROOMY).peak_reserved_bytes == 50 * MIB
    emptied = replay(replace(trace, emptied=(2,)), ROOMY)
    assert (emptied.peak_reserved_bytes, emptied.cache_flushes) == (30 * MIB, 0)
    assert replay(replace(trace, emptied=(1, 3)), ROOMY).peak_reserved_bytes == 50 * MIB


def test_each_phase_has_its_own_reserved_peak() -> None:
    # Phases start from what the cache holds: nothing is given back without need.
    trace = timeline(30 * MIB, -1, 10 * MIB, 40 * MIB, phases=(("init", 0), ("forward", 2), ("step", 3)))
    result = replay(trace, ROOMY)
    assert [(phase.phase, phase.peak_reserved_bytes // MIB) for phase in result.phases] == [
        ("init", 30),
        ("forward", 30),
        ("step", 70),
    ]
    assert result.phase("step").peak_reserved_bytes == 70 * MIB
    with pytest.raises(KeyError, match="save"):
        result.phase("save")
    # 10 of the first 30 MiB are in use when the last 40 are taken: 20 of 70 lie idle.
    assert result.idle_bytes == 20 * MIB
    assert result.fragmentation == pytest.approx(20 / 70)


def test_what_a_phase_gave_back_does_not_count_for_the_next() -> None:
    # 60 MiB are given back for 30 on another stream within the first phase; the second holds 30.
    trace = timeline((60 * MIB, 0), -1, (30 * MIB, 1), -2, (30 * MIB, 1), phases=(("encode", 0), ("step", 3)))
    result = replay(trace, 65 * MIB)
    assert (result.cache_flushes, result.peak_reserved_bytes) == (1, 60 * MIB)
    assert result.phase("encode").peak_reserved_bytes == 60 * MIB
    assert result.phase("step").peak_reserved_bytes == 30 * MIB


def test_expandable_segments_grow_in_pages_of_20_mib_and_of_2_mib() -> None:
    # 21 MiB need two pages of 20; 19 MiB go into their rest; 1 MiB three times needs two pages of 2.
    pages = timeline(21 * MIB, 19 * MIB, MIB, MIB, MIB)
    assert found(replay(pages, ROOMY, expandable_segments=True)) == (44 * MIB, 43 * MIB)


def test_a_block_grows_out_of_free_memory_into_new_pages() -> None:
    # 35 MiB leave 5 of two pages; 25 take these and one page more, not two.
    assert found(replay(timeline(35 * MIB, 25 * MIB), ROOMY, expandable_segments=True)) == (60 * MIB, 60 * MIB)


def test_expandable_segments_have_no_sliver() -> None:
    # 11 MiB leave 1 MiB of a segment of 12, which is kept; a page is split at any 512 B.
    assert replay(timeline(11 * MIB), ROOMY).peak_allocated_bytes == 12 * MIB
    assert replay(timeline(11 * MIB), ROOMY, expandable_segments=True).peak_allocated_bytes == 11 * MIB


def test_expandable_segments_join_what_lay_in_different_segments() -> None:
    # Two freed blocks of 100 MiB serve 200 MiB where they are neighbours, and not where each has its own segment.
    trace = timeline(100 * MIB, 100 * MIB, -1, -2, 200 * MIB)
    assert replay(trace, ROOMY, expandable_segments=True).peak_reserved_bytes == 200 * MIB
    assert replay(trace, ROOMY).peak_reserved_bytes == 400 * MIB
    assert replay(trace, 300 * MIB).cache_flushes == 1


def test_the_block_before_unmapped_addresses_counts_with_what_the_card_has_of_them() -> None:
    # 100 MiB are free, and 20 of the last page. On 160 MiB there are 180 of addresses: with the 40 behind it the page
    # is the smaller one and takes 15, so that the next 100 find theirs. With more behind it the page comes last.
    trace = timeline(100 * MIB, 20 * MIB, 20 * MIB, -1, -3, 15 * MIB, 100 * MIB)
    reserved = [
        replay(trace, ROOMY, expandable_segments=True, card_bytes=card).peak_reserved_bytes
        for card in (160 * MIB, None)
    ]
    assert reserved == [140 * MIB, 220 * MIB]
    assert replay(trace, 160 * MIB, expandable_segments=True).peak_reserved_bytes == 140 * MIB


def test_expandable_segments_may_reserve_more() -> None:
    # 30 MiB in pages of 20 are 40, the next 15 fill the rest of 10 and a third page: 60. Whole segments: 30 + 16.
    trace = timeline(30 * MIB, 15 * MIB)
    assert replay(trace, ROOMY, expandable_segments=True).peak_reserved_bytes == 60 * MIB
    assert replay(trace, ROOMY).peak_reserved_bytes == 46 * MIB


def test_expandable_segments_give_back_whole_pages_only() -> None:
    # 30 and 10 MiB fill two pages. With the 30 free, the first page can go, the second holds the 10.
    trace = timeline((30 * MIB, 0), (10 * MIB, 0), -1, (20 * MIB, 1))
    result = replay(trace, 40 * MIB, expandable_segments=True)
    assert result.fits
    assert (result.peak_reserved_bytes, result.cache_flushes) == (40 * MIB, 1)
    failure = replay(trace, 39 * MIB, expandable_segments=True).failure
    assert failure.event == 0  # 30 MiB need both pages


def test_unmapped_pages_are_mapped_again_where_they_were() -> None:
    # Pages 0 and 1 are unmapped for stream 1's 60 MiB. Then stream 0 asks for 40: at its lowest addresses again,
    # for which stream 1's pages must go.
    trace = timeline((40 * MIB, 0), (20 * MIB, 0), -1, (60 * MIB, 1), -3, (40 * MIB, 0))
    playback = Playback(trace, 100 * MIB, expandable_segments=True)
    blocks = [playback.step(at) for at in range(len(trace.events))]
    assert blocks[5].address == blocks[0].address
    assert playback.device.reserved_bytes == 60 * MIB
    assert playback.allocator.cache_flushes == 2


def test_a_free_block_before_unmapped_addresses_is_the_last_choice() -> None:
    # Free are 10 MiB between two blocks and 5 MiB at the end of the mapped pages (5 + 10 + 20 of 40). 5 MiB fit the
    # end exactly, but that can grow: the 10 are taken.
    trace = timeline(5 * MIB, 10 * MIB, 20 * MIB, -2, 5 * MIB)
    playback = Playback(trace, ROOMY, expandable_segments=True)
    _, between, _, _, last = [playback.step(at) for at in range(5)]
    assert last.address == between.address


def test_pages_mapped_in_vain_count_until_they_are_given_back() -> None:
    # Stream 0 fills four pages and frees the first and third, which go for a page of stream 1: 60 of 80 MiB reserved.
    # It frees the second, and asks for 60: the first page is mapped again (80), the third does not fit. All three are
    # given back (40 remain), but three pages at once do not fit either: 40 + 60 > 80.
    page = 20 * MIB
    events = (page, page, page, page, -1, -3, (10 * MIB, 1), -2, 60 * MIB)
    result = replay(timeline(*events, phases=(("first", 0), ("last", 8))), 80 * MIB, expandable_segments=True)
    assert result.phase("last").peak_reserved_bytes == 80 * MIB
    assert result.cache_flushes == 2
    assert (result.failure.reserved_bytes, result.failure.allocated_bytes) == (40 * MIB, 30 * MIB)
    assert replay(timeline(*events), 100 * MIB, expandable_segments=True).fits


def test_the_cache_is_emptied_on_demand() -> None:
    for expandable in (False, True):
        cache, device = allocator(expandable=expandable)
        blocks = [cache.malloc(size, stream) for size in (100, 3 * MIB, 50 * MIB) for stream in (0, 1)]
        for block in blocks:
            cache.free(block)
        assert device.reserved_bytes > 0
        cache.empty_cache()
        assert (device.reserved_bytes, cache.allocated_bytes) == (0, 0)
