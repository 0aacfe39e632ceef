"""The repository that bigdit runs from, if it does: it has files that a wheel does not bring along."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Of the repository; what packages lie in where pip installed bigdit."""


def in_checkout() -> bool:
    """Whether this is one, with its Makefile, or what pip installed."""
    return (ROOT / "Makefile").exists()


def own_module(name: str) -> tuple[str, ...]:
    """What python is given to run this module. Without -P it would take any other of its name, or of a library's, that
    lies in the folder where people are, such as another checkout."""
    return "-P", "-m", name


def entry(module_option: str = "-m") -> tuple[str, ...]:
    """What python or a launcher starts to train: a script of the checkout, by its path from here, or a module by that
    option."""
    return (os.path.relpath(ROOT / "launch/train.py"),) if in_checkout() else (module_option, "bigdit.launch")
