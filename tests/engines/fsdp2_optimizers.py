"""Optimizers that need whole weights, or sums over all, under FSDP2: beside one process, and through a checkpoint.
Prints a line of JSON.

    torchrun --nproc-per-node 4 tests/engines/fsdp2_optimizers.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp2_curves import batch, start, strategy
from resuming import save
from tiny_models import SANA
from whole import full_weights

from bigdit import checkpoint
from bigdit.dist import World, world_from_env
from bigdit.engines import Engine
from bigdit.engines.state import state_slices
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import LoraSpec, OptimizerName, OptimizerSpec
from bigdit.train.step import train_step

RATES: dict[OptimizerName, float] = {"prodigy": 1.0, "adamw_schedulefree": 1e-3, "muon": 1e-3}
STEPS = 3
ADAPTERS = {"lora": LoraSpec(rank=3), "precision": "bf16"}
"""Of four processes the last has no rows of an adapter with rank 3."""


def begun(name: OptimizerName, world: World, **options: object) -> Engine:
    optimizer = OptimizerSpec(name=name, lr=RATES[name], weight_decay=0.01, decayed="matrices")
    options = {"gradient_clipping": 1.0} | options
    return start(SANA, strategy(world.world_size, optimizer=optimizer, **options))


def taken(begun: tuple, world: World, first: int, last: int) -> None:
    engine, family = begun
    for number in range(first, last):
        lr = RATES[engine.strategy.optimizer.name]
        train_step(engine, family, FlowMatchingSpec(), [batch(SANA, number, world)], lr=lr)


def resumes(folder: Path, name: OptimizerName, straight: tuple, world: World, **options: object) -> bool:
    """Whether the last step after a checkpoint equals that of the run without one to the bit."""
    peers = checkpoint.Peers(world)
    save(folder, straight[0], None, peers)
    taken(straight, world, STEPS - 1, STEPS)
    again = begun(name, world, **options)
    checkpoint.restore(checkpoint.latest(folder)[0], again[0], peers)
    taken(again, world, STEPS - 1, STEPS)
    mine, others = (state_slices(engine, None, world.rank) for engine in (straight[0], again[0]))
    same = mine.keys() == others.keys() and all(torch.equal(mine[key].tensor, others[key].tensor) for key in mine)
    everywhere: list[bool] = [False] * world.world_size
    dist.all_gather_object(everywhere, same)
    return all(everywhere)


def apart(found: dict, expected: dict, before: dict) -> float:
    """How far weights are from others, as a share of the distance that those moved."""
    squares = [sum(float((some[key] - expected[key]).square().sum()) for key in expected) for some in (found, before)]
    return (squares[0] / squares[1]) ** 0.5


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, alone, answer = world_from_env(), World(), {}
    for name in RATES:
        single = begun(name, alone)
        before = full_weights(single[0])
        taken(single, alone, 0, STEPS)
        engine = begun(name, world, dp_replicate=2)
        taken(engine, world, 0, STEPS - 1)
        same = resumes(folder / name, name, engine, world, dp_replicate=2)
        answer[name] = [apart(full_weights(engine[0]), full_weights(single[0]), before), same]
    found = []
    for in_backward in (False, True):
        engine = begun("muon", world, gradient_clipping=None, optimizer_in_backward=in_backward)
        taken(engine, world, 0, STEPS)
        found.append(full_weights(engine[0]))
    answer["muon in backward"] = [apart(found[1], found[0], before), True]
    for name in ("prodigy", "muon"):
        engine = begun(name, world, **ADAPTERS)
        taken(engine, world, 0, STEPS - 1)
        answer[f"{name} adapters"] = [0.0, resumes(folder / f"{name} adapters", name, engine, world, **ADAPTERS)]
    if world.is_main:
        print(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
