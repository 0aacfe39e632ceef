"""The host's memory as PyTorch keeps it: pinned blocks are rounded up, and never given back."""

from __future__ import annotations

from collections import Counter

from pydantic import NonNegativeInt

from bigdit.memory.timeline import Timeline
from bigdit.spec import Strict


class HostMemory(Strict):
    """What one process holds of its host at the peak, tensors alone.

    `page_locked_bytes` is what the pinned allocator has taken by then, its free blocks included: locked memory
    counts for the whole process, and against the machine's limit on it.
    """

    peak_bytes: NonNegativeInt
    page_locked_bytes: NonNegativeInt


def pinned_bytes(nbytes: int) -> int:
    """The block that the pinned allocator takes for `nbytes`: the next power of two.

    Source: CachingHostAllocatorImpl::allocate in aten/src/ATen/core/CachingHostAllocator.h, torch 2.13, as
    configured without PYTORCH_ALLOC_CONF.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def host_memory(timeline: Timeline) -> HostMemory:
    """Replay a host's timeline: pageable tensors byte for byte, pinned ones through the pinned allocator.

    A freed pinned block serves the next request of its size, at once: where a copy to the device still reads it,
    the real allocator waits for that and may take another one.
    """
    free: Counter[int] = Counter()
    pageable = locked = 0
    peak = HostMemory(peak_bytes=0, page_locked_bytes=0)
    for event in timeline.events:
        block = timeline.blocks[abs(event) - 1]
        if not block.pinned:
            pageable += block.nbytes if event > 0 else -block.nbytes
        elif event < 0:
            free[pinned_bytes(block.nbytes)] += 1
        elif free[pinned_bytes(block.nbytes)]:
            free[pinned_bytes(block.nbytes)] -= 1
        else:
            locked += pinned_bytes(block.nbytes)
        if pageable + locked > peak.peak_bytes:
            peak = HostMemory(peak_bytes=pageable + locked, page_locked_bytes=locked)
    return peak
