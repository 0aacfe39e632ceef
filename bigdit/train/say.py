"""What the main process alone says, though all processes come to it."""

from __future__ import annotations

from collections.abc import Iterable

from bigdit import log
from bigdit.dist import World


def say(world: World, lines: Iterable[str], *, notes: bool = False) -> None:
    """Print the lines once; `notes`: each as a note, of something that a person should know and nobody asked for."""
    for line in lines if world.is_main else ():
        log.notice(f"note: {line}" if notes else line)
