"""A card of the catalogue as the stub libraries read it: one line of settings."""

from __future__ import annotations

from bigdit.catalog import Gpu
from bigdit.catalog.gpus import capability
from bigdit.errors import UserError
from bigdit.memory.process import cuda_context, nccl_buffers
from bigdit.units import KIB, MIB

CARDS_MOST = 16
"""As many as the libraries count (card.h)."""

VALUES_BYTES = 64 * KIB
"""Tensors up to this size hold values; larger ones are never written, nor moved."""

_L2_MIB = 40
"""Where the catalogue does not know a card's: no allocation was seen to depend on it."""


def settings(gpu: Gpu, cards: int, state: str | None = None, *, values: bool = True) -> str:
    """BIGDIT_EMULATED_CARD for `cards` cards of this kind in one machine.

    `state` is the file that their processes share; None: each process has the cards for itself. A process's context
    is the most that it may be, and so is what NCCL takes where there are several cards. Without `values` no tensor
    holds any. Raises UserError for more cards than there can be.
    """
    if not 1 <= cards <= CARDS_MOST:
        raise UserError(f"{cards} cards are asked for; one machine is emulated with 1 to {CARDS_MOST}")
    has = capability(gpu.compute_capability)
    major, minor = gpu.compute_capability
    figures = {
        "major": major,
        "minor": minor,
        "multiprocessors": gpu.multiprocessors,
        "threads": has.threads,
        "blocks": has.blocks,
        "shared": has.shared_bytes,
        "shared_optin": has.shared_optin_bytes,
        "l2": int((gpu.l2_mib or _L2_MIB) * MIB),
        "total": gpu.total_bytes,
        "usable": gpu.told_bytes,
        "context": cuda_context(gpu.compute_capability, gpu.multiprocessors).high_bytes,
        "nccl": nccl_buffers(gpu.compute_capability, max(cards, 2)).high_bytes,
        "values": VALUES_BYTES if values else 0,
        "count": cards,
    }
    shared = {} if state is None else {"state": state}
    return " ".join(f"{key}={value}" for key, value in {**figures, **shared, "name": gpu.title}.items())
