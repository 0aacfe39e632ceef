"""How a launched process ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End with `status` as the interpreter would, but that it is not taken apart: a thread of gloo that lets go of its
    last tensor meanwhile aborts the process (torch 2.13, c10d::ProcessGroupGloo::runLoop), and a run that is whole
    would end as one that failed."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 120  # as the interpreter ends where its last words are lost
    os._exit(status)
