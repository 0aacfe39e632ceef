"""How the caching allocator gets memory from the card: in whole segments, or in segments that grow page by page.

Source: c10/cuda/CUDACachingAllocator.cpp, in the functions named below; constants from c10/core/AllocatorConfig.h of
torch 2.13.
"""

from __future__ import annotations

import bisect

from bigdit.memory.caching import MIN_BLOCK, SMALL_SIZE, Block, Device, Pool
from bigdit.memory.timeline import rounded
from bigdit.units import MIB

SMALL_BUFFER = 2 * MIB
"""kSmallBuffer: a segment, or a page, of the small pools."""
MIN_LARGE_ALLOC = 10 * MIB
"""kMinLargeAlloc: from here a block gets a segment of its own size."""
LARGE_BUFFER = 20 * MIB
"""large_segment_size (earlier kLargeBuffer): a segment that smaller blocks of the large pools share, or a page."""
ROUND_LARGE = 2 * MIB
"""kRoundLarge: larger segments are multiples of this."""


class WholeSegments:
    """Segments from cudaMalloc, the default: they go back to the card whole or not at all."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def take(self, pool: Pool, size: int) -> Block | None:
        """Best fit: the smallest free block that holds `size`. Source: get_free_block."""
        at = bisect.bisect_left(pool.free, (size,))
        return pool.free.pop(at)[2] if at < len(pool.free) else None

    def grow(self, pool: Pool, size: int) -> Block | None:
        """A new segment. Source: get_allocation_size, alloc_block."""
        if pool.is_small:
            nbytes = SMALL_BUFFER
        else:
            nbytes = LARGE_BUFFER if size < MIN_LARGE_ALLOC else rounded(size, ROUND_LARGE)
        if not self._device.fits(nbytes):
            return None
        block = Block(pool, self._device.new_addresses(nbytes), nbytes)
        self._device.hand_out("segment_alloc", block.address, nbytes, pool.stream)
        return block

    def smallest_rest(self, pool: Pool) -> int:
        """Small blocks leave no crumb; large ones keep up to 1 MiB too much. Source: should_split."""
        return MIN_BLOCK if pool.is_small else SMALL_SIZE + 1

    def release(self, pool: Pool) -> None:
        """Free segments that are one free block. Source: release_blocks, release_block."""
        for _, _, block in list(pool.free):
            if block.is_whole_segment:
                pool.remove(block)
                self._device.take_back("segment_free", block.address, block.size, pool.stream)


class ExpandableSegments:
    """One segment a pool, of more addresses than the card has memory, with pages mapped where blocks are.

    Chosen by PYTORCH_ALLOC_CONF=expandable_segments:True. A page is 2 MiB in small pools and 20 MiB in large ones.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def take(self, pool: Pool, size: int) -> Block | None:
        """Best fit, where a block before unmapped addresses counts with these. Source: get_free_block."""
        at = bisect.bisect_left(pool.free, (size,))
        if at == len(pool.free):
            return None
        while at + 1 < len(pool.free) and _expandable_size(pool.free[at + 1][2]) < _expandable_size(pool.free[at][2]):
            at += 1
        return pool.free.pop(at)[2]

    def grow(self, pool: Pool, size: int) -> Block | None:
        """Map pages until a block is large enough. Source: try_allocate_expandable_block.

        What was mapped before the card ran full stays in the pool.
        """
        block = self._with_room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            unmapped = block.next
            assert unmapped is not None  # _with_room saw to it
            if not self._map(unmapped, min(unmapped.size, size - block.size)):
                return None
            block = unmapped  # which has absorbed the block before it
        pool.remove(block)
        return block

    def smallest_rest(self, pool: Pool) -> int:
        """Source: should_split."""
        return MIN_BLOCK

    def release(self, pool: Pool) -> None:
        """Unmap the pages that lie wholly in free blocks. Source: release_blocks, unmap_block."""
        page = _page(pool)
        for _, _, block in list(pool.free):
            start, stop = rounded(block.address, page), (block.address + block.size) // page * page
            if start < stop:
                self._unmap(block, start, stop)

    def _with_room(self, pool: Pool, size: int) -> Block:
        """The lowest addresses, free or unmapped, that hold `size`; a new segment's where there are none.

        Source: find_expandable_block, and ExpandableSegment, whose addresses are 9/8 of the card's memory.
        """
        for _, unmapped in pool.unmapped:
            before = unmapped.prev
            first = before if before is not None and not before.allocated else unmapped
            room, block = 0, first
            while room < size and block is not None and not block.allocated:
                room += block.size
                block = block.next  # type: ignore[assignment]
            if room >= size:
                return first
        card = self._device.card_bytes
        addresses = rounded(max(card + card // 8, size), LARGE_BUFFER)  # more than the card can back
        segment = Block(pool, self._device.new_addresses(addresses), addresses, mapped=False)
        pool.insert(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Put pages behind the first `size` bytes or more; False where the card has no room. Source: map_block."""
        pool = block.pool
        size = rounded(size, _page(pool))
        if not self._device.fits(size):
            return False
        pool.remove(block)
        if size < block.size:
            pool.insert(block.split(size))
        block.mapped = True
        self._device.hand_out("segment_map", block.address, size, pool.stream)
        block.absorb(block.prev)
        block.absorb(block.next)
        pool.insert(block)
        return True

    def _unmap(self, block: Block, start: int, stop: int) -> None:
        pool = block.pool
        pool.remove(block)
        if block.address < start:
            rest = block.split(start - block.address)
            pool.insert(block)
            block = rest
        if stop < block.address + block.size:
            pool.insert(block.split(stop - block.address))
        block.mapped = False
        self._device.take_back("segment_unmap", start, stop - start, pool.stream)
        block.absorb(block.prev)
        block.absorb(block.next)
        if not block.is_whole_segment:  # an empty segment goes with its addresses
            pool.insert(block)


def _page(pool: Pool) -> int:
    return SMALL_BUFFER if pool.is_small else LARGE_BUFFER


def _expandable_size(block: Block) -> int:
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)
