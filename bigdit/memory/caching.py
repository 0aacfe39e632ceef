"""PyTorch's CUDA caching allocator, rule by rule, over a card that only counts bytes.

Source: c10/cuda/CUDACachingAllocator.cpp, class DeviceCachingAllocator, in the functions named below; constants from
c10/core/AllocatorConfig.h of torch 2.13. Options are at their defaults: no rounding to powers of two, no limit to
splitting, no garbage collection. CUDA graphs' private pools are left out, and so is `record_stream`: a freed block
is free at once, as it is where a tensor is used on the stream that allocated it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Literal, Protocol

from bigdit.memory.timeline import rounded
from bigdit.units import MIB

MIN_BLOCK = 512
"""kMinBlockSize: blocks are multiples of this."""
SMALL_SIZE = MIB
"""kSmallSize: the largest block of the small pools."""

Change = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
OnChange = Callable[[Change, int, int, int], None]
"""Hears of memory that a card hands out or takes back: what, address, bytes, stream."""

_FIRST_ADDRESS = 127 * 20 * 2**36  # any; a multiple of every size that segments have


class Device:
    """`capacity_bytes` of a card's memory, of which `reserved_bytes` are handed out.

    `card_bytes` is all that it has, where that is not the same: expandable segments have addresses by it.
    `peak_reserved_bytes` is the highest level since `reset_peak`. Addresses only rise. cudaMalloc picks its own:
    they matter where free blocks of one size compete, of which the lowest wins.
    """

    def __init__(
        self, capacity_bytes: int, on_change: OnChange | None = None, *, card_bytes: int | None = None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.card_bytes = capacity_bytes if card_bytes is None else card_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._on_change = on_change
        self._next_address = _FIRST_ADDRESS

    def fits(self, nbytes: int) -> bool:
        return self.reserved_bytes + nbytes <= self.capacity_bytes

    def reset_peak(self) -> None:
        self.peak_reserved_bytes = self.reserved_bytes

    def new_addresses(self, nbytes: int) -> int:
        """The first of `nbytes` addresses that nobody has."""
        address = self._next_address
        self._next_address += nbytes
        return address

    def hand_out(self, change: Change, address: int, nbytes: int, stream: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if self._on_change:
            self._on_change(change, address, nbytes, stream)

    def take_back(self, change: Change, address: int, nbytes: int, stream: int) -> None:
        self.reserved_bytes -= nbytes
        if self._on_change:
            self._on_change(change, address, nbytes, stream)


class Block:
    """A piece of a segment, between its neighbours `prev` and `next`; an unmapped one has no memory behind it."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: Pool, address: int, size: int, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.allocated = False
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        return self.prev is None and self.next is None

    def split(self, size: int) -> Block:
        """Keep the first `size` bytes; the rest, a free block behind this one, is returned."""
        rest = Block(self.pool, self.address + size, self.size - size, self.mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def absorb(self, other: Block | None) -> None:
        """Take a neighbour in, out of its pool, if it is free and mapped as this is. Source: try_merge_blocks."""
        if other is None or other.allocated or other.mapped is not self.mapped:
            return
        self.pool.remove(other)
        if other is self.prev:
            self.address, self.prev = other.address, other.prev
            if self.prev is not None:
                self.prev.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.prev = self
        self.size += other.size


class Pool:
    """The free blocks of one stream and size class: mapped ones by size and address, unmapped ones by address.

    Source: BlockComparatorSize, BlockComparatorAddress.
    """

    def __init__(self, stream: int, is_small: bool) -> None:
        self.stream, self.is_small = stream, is_small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def insert(self, block: Block) -> None:
        if block.mapped:
            bisect.insort(self.free, (block.size, block.address, block))
        else:
            bisect.insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect.bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.address,))]


class Segments(Protocol):
    """How pools get memory from the card: `segments.WholeSegments`, or `segments.ExpandableSegments`."""

    def take(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least `size`, out of the pool; None where there is none."""

    def grow(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size` from the card, in no pool; None where the card has no room."""

    def smallest_rest(self, pool: Pool) -> int:
        """A block is split where at least this much remains."""

    def release(self, pool: Pool) -> None:
        """Give back to the card what can be given back."""


def fits(ran_out: bool, retries: int) -> bool:
    """Whether steps count as fitting: they ran, and never waited for an allocator that was short of room and had to
    give back what it kept."""
    return not ran_out and not retries


class OutOfMemory(Exception):
    """The card has no room for a block, and the caches had nothing left to give back."""


class CachingAllocator:
    """Blocks of memory by stream, kept when they are freed.

    `allocated_bytes` counts blocks with what rounding and refused splits add. `cache_flushes` is what
    torch.cuda.memory_stats calls num_alloc_retries: each of them waits for the whole card.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._pools: dict[tuple[int, bool], Pool] = {}
        self.allocated_bytes = 0
        self.cache_flushes = 0

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """A block for `nbytes`, more than none. Raises OutOfMemory. Source: malloc, round_size, get_pool."""
        size = rounded(nbytes, MIN_BLOCK)
        pool = self._pool(stream, size <= SMALL_SIZE)
        block = self._segments.take(pool, size) or self._segments.grow(pool, size)
        if block is None:
            self.cache_flushes += 1
            self.empty_cache()
            block = self._segments.grow(pool, size)
        if block is None:
            raise OutOfMemory
        if block.size - size >= self._segments.smallest_rest(pool):
            pool.insert(block.split(size))
        block.allocated = True
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Keep `block` for later, joined with its free neighbours. Source: free_block."""
        self.allocated_bytes -= block.size
        block.allocated = False
        block.absorb(block.prev)
        block.absorb(block.next)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Give back what no block uses, of all streams. Source: release_cached_blocks."""
        for pool in self._pools.values():
            self._segments.release(pool)

    def free_blocks(self) -> list[Block]:
        """What is kept, with memory behind it."""
        return [block for pool in self._pools.values() for _, _, block in pool.free]

    def _pool(self, stream: int, is_small: bool) -> Pool:
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = Pool(stream, is_small)
        return pool
