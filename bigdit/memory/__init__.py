"""Memory as a record of events and its sums; what a process takes beside torch's reserved memory.

Nothing here imports torch: events come from `record`.
"""

from bigdit.memory.timeline import (
    CATEGORIES,
    CUDA_GRANULARITY,
    Block,
    Category,
    Collective,
    HostMemory,
    Ledger,
    OperatorCost,
    PhasePeak,
    Place,
    Span,
    Timeline,
    host_memory,
    ledger,
    pinned_bytes,
    rounded,
)

__all__ = [
    "CATEGORIES",
    "CUDA_GRANULARITY",
    "Block",
    "Category",
    "Collective",
    "HostMemory",
    "Ledger",
    "OperatorCost",
    "PhasePeak",
    "Place",
    "Span",
    "Timeline",
    "host_memory",
    "ledger",
    "pinned_bytes",
    "rounded",
]
