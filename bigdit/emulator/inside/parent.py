"""The environment that `bigdit emulate` sets for its processes, and the files that they leave for it."""

from __future__ import annotations

import contextlib
import faulthandler
import glob
import json
import os
import signal
from typing import Any

OUT = os.environ.get("BIGDIT_EMULATED_OUT", "")
"""The folder for accounts."""

STEPS = int(os.environ.get("BIGDIT_EMULATED_STEPS") or 0)
"""Optimizer steps after which a process ends; 0 for no limit."""

SKIP_FIRST = os.environ.get("BIGDIT_EMULATED_SKIP_FIRST") == "1"
"""Whether the loss scaler's first step overflows."""

SNAPSHOT = os.environ.get("BIGDIT_EMULATED_SNAPSHOT") == "1"
"""Whether to write a snapshot for PyTorch's memory_viz."""


def write_stack_on_signal() -> None:
    """On SIGUSR2, write the stack of the main thread, even while it waits in a library. A fork has its own file."""

    def open_own() -> None:
        with contextlib.suppress(OSError, ValueError):
            place = os.open(os.path.join(OUT, f"where-{os.getpid()}.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            faulthandler.register(signal.SIGUSR2, file=place, all_threads=False)

    open_own()
    os.register_at_fork(after_in_child=open_own)


def write_json(name: str, value: Any) -> None:
    write(name, json.dumps(value, default=str).encode())


def write(name: str, content: bytes) -> None:
    """Write a whole file in the folder for accounts. Does nothing if there is no folder any more."""
    if not OUT:
        return
    temporary = os.path.join(OUT, f".tmp-{os.getpid()}-{name}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, os.path.join(OUT, name))
    except FileNotFoundError:
        pass


def count(pattern: str) -> int:
    """The number of files in the folder with names of this pattern."""
    return len(glob.glob(pattern, root_dir=OUT)) if OUT else 0
