"""Memory as a record of events, and its sums. Nothing here imports torch."""

from bigdit.memory.ledger import CUDA_GRANULARITY, Ledger, PhasePeak, ledger
from bigdit.memory.timeline import CATEGORIES, Block, Category, Span, Timeline, rounded

__all__ = [
    "CATEGORIES",
    "CUDA_GRANULARITY",
    "Block",
    "Category",
    "Ledger",
    "PhasePeak",
    "Span",
    "Timeline",
    "ledger",
    "rounded",
]
