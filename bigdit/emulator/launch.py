"""The environment in which a process, and all that it starts, finds emulated cards.

A card of the catalogue is to the stub libraries one line of settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigdit.catalog import Gpu
from bigdit.catalog.gpus import capability
from bigdit.emulator import build
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


HOOK = Path(__file__).parent / "hook"
"""A folder with a sitecustomize.py, which Python runs when it starts."""

_STATE_BYTES = 1 << 20
"""More than the libraries' table of processes takes (card.c)."""


def emulated_environment(
    gpu: Gpu, cards: int = 1, state: str | None = None, *, peers: bool = True, values: bool = True
) -> dict[str, str]:
    """Variables for a child process, to be merged over this process's own.

    `state`: the file of `shared_state`, where several processes fill the same cards. Without `peers` a process group's
    other ranks are not there; without `values` no small tensor is computed either, and all that is read of the card is
    zero: for runs of one process whose memory follows from shapes. Host tensors of 32 MiB and more share pages and hold
    nothing, and what is saved beyond a MiB of a file is a hole in it.

    Raises UserError for too many cards, and where there is no C compiler.
    """
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "BIGDIT_EMULATED_CARD": settings(gpu, cards, state, values=values),
        "BIGDIT_EMULATED_CACHE": str(build.cache_folder()),
        "BIGDIT_EMULATED_RECIPE": build.recipe(),
        "BIGDIT_EMULATED_BUILDER": sys.executable,
        "BIGDIT_EMULATED_HOME": str(Path(__file__).parents[2]),
        "BIGDIT_EMULATED_PEERS": "1" if peers else "0",
        "BIGDIT_EMULATED_VALUES": "1" if values else "0",
        "DS_ACCELERATOR": "cuda",  # whatever this process told its own DeepSpeed
        "PYTHONPATH": os.pathsep.join(paths),
    }


def on_emulated_card() -> bool:
    """Whether this process's CUDA devices, if it has any, are emulated."""
    return "BIGDIT_EMULATED_CARD" in os.environ


@contextmanager
def shared_state() -> Iterator[str]:
    """The path of a file without a name, in which the processes of one emulation count their bytes together.

    It lies in this process's memory: when this process ends, however it ends, nothing is left.
    """
    descriptor = os.memfd_create("bigdit-cards", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _STATE_BYTES)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
