"""The processes that save and restore together, in a group of their own: training's collectives continue meanwhile."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from bigdit.dist import World
from bigdit.errors import UserError

T = TypeVar("T")
ALONE = World()


class Peers:
    """All processes of `world` make one at the same place, once training's own group exists."""

    def __init__(self, world: World = ALONE) -> None:
        self.world = world
        self.group = dist.new_group(backend="gloo") if world.world_size > 1 else None

    def gather(self, value: T) -> list[T]:
        """Each process's value, by rank, on all."""
        if self.group is None:
            return [value]
        found: list[T] = [value] * self.world.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, problem: str | None) -> None:
        """Raise UserError on all processes where one has a problem: the first of them."""
        for each in self.gather(problem):
            if each is not None:
                raise UserError(each)
