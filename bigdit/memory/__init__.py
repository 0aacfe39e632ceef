"""Memory as a record of events and its sums; what a process takes beside torch's reserved memory.

Nothing here imports torch: events come from `record`.
"""

from bigdit.memory.host import HostMemory, host_memory, pinned_bytes
from bigdit.memory.ledger import CUDA_GRANULARITY, Ledger, PhasePeak, ledger
from bigdit.memory.timeline import (
    CATEGORIES,
    Block,
    Category,
    Collective,
    OperatorCost,
    Place,
    Span,
    Timeline,
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
