"""A process that cannot be emulated says why, once and for all, and ends."""

from __future__ import annotations

import os
import sys

from . import files


def refuse(reason: str) -> None:
    """End this process with exit status 1; `bigdit emulate` shows `reason`, a line, as the user's error."""
    files.write_json(f"refused-{os.getpid()}.json", {"reason": reason})
    sys.stderr.write(f"bigdit emulate: {reason}\n")
    sys.stderr.flush()
    os._exit(1)
