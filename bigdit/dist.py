"""The place of this process among its fellows, as launchers announce it in the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bigdit.errors import UserError


@dataclass(frozen=True)
class World:
    """`rank` of `world_size` processes, `local_rank` on this machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_from_env() -> World:
    """What torchrun, the deepspeed launcher and accelerate set: RANK, LOCAL_RANK, WORLD_SIZE; else one process."""
    values = {}
    for key, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        text = os.environ.get(key, default)
        if not text.isdigit():
            raise UserError(f"the environment variable {key} should be a number, and {text!r} was found")
        values[key] = int(text)
    return World(values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"])
