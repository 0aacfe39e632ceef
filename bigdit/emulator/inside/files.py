"""Files for who started the emulation: whole or not at all."""

from __future__ import annotations

import glob
import json
import os
from typing import Any

from . import options


def write_json(name: str, value: Any) -> None:
    write(name, json.dumps(value, default=str).encode())


def write(name: str, content: bytes) -> None:
    """Write a file of the folder of accounts; nothing where there is none, or it is gone: nobody waits for it."""
    if not options.OUT:
        return
    final = os.path.join(options.OUT, name)
    temporary = os.path.join(options.OUT, f".tmp-{os.getpid()}-{name}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except FileNotFoundError:
        pass


def count(pattern: str) -> int:
    """How many files of the folder are called so."""
    return len(glob.glob(pattern, root_dir=options.OUT)) if options.OUT else 0
