"""The model of a stage on the device, under the engine that steps it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from bigdit import checkpoint, engines, models
from bigdit.catalog.families import objective_of
from bigdit.dist import World
from bigdit.engines import Ema, Engine
from bigdit.models import Family
from bigdit.models.compiling import compiling_said
from bigdit.objective_spec import ObjectiveSpec
from bigdit.spec import Strategy
from bigdit.train import exports
from bigdit.train.beside_plan import PlannedMemory, planned_memory
from bigdit.train.feed import Feed
from bigdit.train.going_on import Start
from bigdit.train.measure import MemoryMeter
from bigdit.train.relief import Relief, read_relief, relieved
from bigdit.train.saves import snapshots_said
from bigdit.train.say import say


@dataclass(frozen=True)
class Stepped:
    """An `engine`, what it trains, and the `meter` of its memory, beside what was `planned` of that.

    `relief`: what the run has come to where memory ran out; `smaller`: what it would go on with if it does again, None
    where nothing is left to take. `peers` are asked while main threads are within a step.
    """

    engine: Engine
    ema: Ema | None
    family: Family
    objective: ObjectiveSpec
    meter: MemoryMeter
    planned: PlannedMemory | None
    relief: Relief
    smaller: Strategy | None
    peers: checkpoint.Peers

    @property
    def strategy(self) -> Strategy:
        """How it is stepped now."""
        return self.relief.now


def on_engine(start: Start, feed: Feed, world: World, device: torch.device, stack: ExitStack) -> Stepped:
    """The model of the stage that was reached, as the checkpoint has it where there is one.

    Raises UserError where its weights, or that checkpoint, cannot be read.
    """
    found, spec, run, plan = start.found, start.reached.spec, start.reached.stage.run, start.reached.stage.plan
    family, peers = models.family(spec.class_name), checkpoint.Peers(world)
    (relief, *_) = peers.gather(read_relief(run.output, start.reached.strategy) if world.is_main else None)
    assert relief is not None
    strategy = relief.now
    if found is not None:
        checkpoint.verify(found, peers)
        if world.is_main:
            exports.export_missed(run, start.ends, found)
    model = models.equip(_weights(start, strategy), family, strategy, seed=run.train.seed)
    sizes = () if plan is None else (plan.strategy.step_size, *plan.smaller)
    smaller = relieved(strategy, sizes, len(family.blocks(model)))
    say(world, snapshots_said(run, model), notes=True)
    if found is not None:
        checkpoint.load_weights(found, model)
    meter = MemoryMeter(device)
    if strategy.compile_blocks:
        say(world, [compiling_said(emulated=meter.emulated)], notes=True)
    engine = engines.create(strategy, model, family, device=device, world=world)
    ema = engines.ema_of(engine)
    if found is not None:
        say(world, checkpoint.restore(found, engine, peers, ema), notes=True)
        say(world, [f"going on from {found.folder}, step {start.step}"])
    objective, planned = objective_of(spec, run.objective), planned_memory(plan, strategy, device.type)
    return Stepped(engine, ema, family, objective, meter, planned, relief, smaller, peers)


def _weights(start: Start, strategy: Strategy) -> nn.Module:
    """The plain model on the host: empty where a checkpoint fills all of it, else from init_from, or drawn."""
    spec, run = start.reached.spec, start.reached.stage.run
    dtype, source = engines.compute_dtype(strategy), run.model.init_from
    if start.found is not None and strategy.lora is None:
        return models.skeleton(spec, dtype=dtype)
    if source is not None:
        return checkpoint.load_model(spec, source, dtype=dtype)
    return models.build(spec, device="cpu", dtype=dtype, seed=run.train.seed)
