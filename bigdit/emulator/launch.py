"""The environment in which a process, and all that it starts, finds emulated cards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigdit.catalog import Gpu
from bigdit.emulator import build
from bigdit.emulator.card import settings

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
