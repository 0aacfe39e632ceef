"""Whether HSDP's replicas have the same bf16 weights after steps that round stochastically. Prints a line of JSON.

torchrun --nproc-per-node 4 tests/engines/fsdp2_replicas.py
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from fsdp2_curves import batch, start
from tiny_models import SANA

from bigdit.dist import World, world_from_env
from bigdit.loader.order import step_seed
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import OptimizerSpec, Strategy
from bigdit.train.step import train_step

STEPS = 2


def weights(optimizer: str, world: World, seed: int) -> list[torch.Tensor]:
    """This process's part of each weight after steps of two copies with two shards each."""
    chosen = Strategy(
        engine="fsdp2",
        world_size=4,
        dp_replicate=2,
        precision="bf16_sr",
        optimizer=OptimizerSpec(name=optimizer, lr=1e-2),
    )
    engine, family = start(SANA, chosen)
    for step in range(STEPS):
        torch.manual_seed(step_seed(seed, step))  # as the trainer does
        train_step(engine, family, FlowMatchingSpec(), [batch(SANA, step, world)], lr=1e-2)
    return [master.detach().clone() for master in engine.masters]


def apart(optimizer: str, world: World, seed: int) -> list[float]:
    """For each process of the first copy, the share of its weights that differ from the second copy's."""
    mine = torch.cat([weight.flatten() for weight in weights(optimizer, world, seed)])
    found: list[torch.Tensor] = [torch.empty(0)] * world.world_size
    dist.all_gather_object(found, mine)
    return [float((found[rank] != found[rank + 2]).float().mean()) for rank in range(2)]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = world_from_env()
    found = {name: apart(name, world, seed=0) for name in ("adamw", "adafactor", "came", "adamw_4bit_ao")}
    found["seeds apart"] = apart("adafactor", world, seed=world.rank)
    if world.is_main:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
