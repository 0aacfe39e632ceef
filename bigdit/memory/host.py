"""The host's memory as PyTorch keeps it: pinned blocks are rounded up, and never given back."""

from __future__ import annotations

from collections import Counter

from pydantic import NonNegativeInt

from bigdit.memory.timeline import Timeline
from bigdit.spec import Strict


class HostMemory(Strict):
    """What one process takes of its host, tensors alone: `peak_bytes` of pageable and page-locked memory together,
    and `steps_bytes` of them once it has started.

    `page_locked_bytes` is what the pinned allocator has taken in the end, its free blocks included: locked memory
    is the process's until it ends, and counts against the machine's limit on it.
    """

    peak_bytes: NonNegativeInt
    steps_bytes: NonNegativeInt
    page_locked_bytes: NonNegativeInt

    def saving(self, checkpoint_bytes: int) -> tuple[int, int]:
        """The peak as it starts or steps, and the one as it saves a copy of so many bytes between steps: never both."""
        return self.peak_bytes, self.steps_bytes + checkpoint_bytes


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
    started = max((span.stop for span in timeline.spans if span.phase == "init"), default=0)
    pageable = locked = peak = steps = 0
    for at, event in enumerate(timeline.events, 1):
        block = timeline.blocks[abs(event) - 1]
        size = pinned_bytes(block.nbytes)
        if not block.pinned:
            pageable += block.nbytes if event > 0 else -block.nbytes
        elif event < 0:
            free[size] += 1
        elif free[size]:
            free[size] -= 1
        else:
            locked += size
        peak = max(peak, pageable + locked)
        if at >= started:
            steps = max(steps, pageable + locked)
    return HostMemory(peak_bytes=peak, steps_bytes=steps, page_locked_bytes=locked)
