"""Whether bigdit runs from its repository, and the commands that start it from there or from an installed package."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The repository, or the folder of packages if pip installed bigdit."""


def in_checkout() -> bool:
    """Whether bigdit runs from its repository, which has a Makefile."""
    return (ROOT / "Makefile").exists()


def own_module(name: str) -> tuple[str, ...]:
    """Python's options that run this module. -P keeps it from importing modules of the working folder, such as another
    checkout."""
    return "-P", "-m", name


def entry(module_option: str = "-m") -> tuple[str, ...]:
    """What python or a launcher starts to train: the repository's script, or a module by `module_option`."""
    return (os.path.relpath(ROOT / "launch/train.py"),) if in_checkout() else (module_option, "bigdit.launch")
