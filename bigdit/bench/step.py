"""A run's step in one process: memory predicted and measured, time interleaved with a loop written by hand."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigdit import catalog, engines, log, models
from bigdit.bench.interleaved import Comparison, Load, take_turns
from bigdit.bench.plain_loop import Step, plain_steps
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.objective_spec import ObjectiveSpec
from bigdit.profile.attempt import Attempt
from bigdit.profile.cards import Cards
from bigdit.profile.lanes import WorkerError
from bigdit.profile.request import StepRequest
from bigdit.profile.steps import batch, feed
from bigdit.receipt import Receipt
from bigdit.shortage import room
from bigdit.spec import BatchShape, ModelSpec, Strategy
from bigdit.train.measure import STEPS, MemoryMeter
from bigdit.train.processes.process import process_group
from bigdit.train.step import train_step
from bigdit.units import gib


@dataclass(frozen=True)
class StepBench:
    """`compared`: with the plain loop; where it is None, `alone` says why."""

    receipt: Receipt
    compared: Comparison | None
    alone: str | None


@dataclass(frozen=True)
class _Asked:
    """What both loops run, and where."""

    spec: ModelSpec
    shape: BatchShape
    strategy: Strategy
    objective: ObjectiveSpec
    seed: int
    device: torch.device

    @property
    def family(self) -> models.Family:
        return models.family(self.spec.class_name)

    def model(self) -> nn.Module:
        """In the compute dtype, on the host, with what the strategy changes in it; each has the same values."""
        dtype = engines.compute_dtype(self.strategy)
        built = models.build(self.spec, device="cpu", dtype=dtype, seed=self.seed)
        return models.equip(built, self.family, self.strategy)

    def fed(self, model: nn.Module) -> Iterator[list[Any]]:
        """Micro-batches of zeros, step by step, as the loader holds them."""
        extras = self.family.extras(model)
        make = functools.partial(batch, self.shape, self.strategy, extras)
        return feed(make, self.strategy, pin=self.device.type == "cuda")


def bench_step(
    spec: ModelSpec, shape: BatchShape, strategy: Strategy, objective: ObjectiveSpec, *, steps: int, seed: int
) -> StepBench:
    """Peak bytes of two steps, and the seconds of those after them, up to `steps`, which are interleaved with a plain
    loop's where there is room for a second model. On a GPU the peaks have those of an emulated one as the prediction.
    """
    load = Load.now()
    with process_group(World(), needed=False) as device:
        asked = _Asked(spec, shape, strategy, objective, seed, device)
        model = asked.model()
        params = sum(parameter.numel() for parameter in model.parameters())
        meter = MemoryMeter(device)
        own = _own_steps(asked, model, meter)
        seconds = [next(own).seconds for _ in range(STEPS)]
        alone = _obstacle(meter, device, params)
        compared = None if alone else _compared(asked, own, steps - STEPS, load)
        seconds += compared.contenders[1].rounds if compared else [next(own).seconds for _ in range(steps - STEPS)]
    return StepBench(_receipt(asked, meter, seconds), compared, alone)


def _predicted(asked: _Asked, meter: MemoryMeter) -> Attempt | None:
    """The same steps on an emulated GPU; None on a CPU, and where they cannot run there, which is logged."""
    if asked.device.type != "cuda":
        return None
    request = StepRequest(model=asked.spec, batch=asked.shape, strategy=asked.strategy, objective=asked.objective)
    try:
        gpu = catalog.resolve_gpu(meter.device_name)
        with Cards(gpu, 1, expandable_segments=meter.expandable_segments) as cards:
            return cards.attempt(request)
    except (UserError, WorkerError) as error:
        log.notice(f"note: memory is not predicted: {error}")
        return None


def _own_steps(asked: _Asked, model: nn.Module, meter: MemoryMeter) -> Iterator[Step]:
    """One step of the trainer's after another, without end; the meter measures the first ones."""
    strategy, family = asked.strategy, asked.family
    engine = engines.create(strategy, model, family, device=asked.device, world=World())
    ema = engines.ema_of(engine)
    lr, ahead = strategy.optimizer.lr, asked.fed(model)
    while True:
        micro_batches = next(ahead)
        began = time.perf_counter()
        with meter.step() as phase:
            result = train_step(engine, family, asked.objective, micro_batches, lr=lr, ema=ema, phase=phase)
        loss = float(result.loss)  # waits for the device
        taken = Step(time.perf_counter() - began, loss)
        del result, micro_batches  # or they would live, and be measured, in the next step
        yield taken


def _obstacle(meter: MemoryMeter, device: torch.device, params: int) -> str | None:
    """Why no plain loop can run beside the engine; None where it can."""
    if meter.emulated:
        return "no kernel runs on an emulated GPU, so that seconds say nothing"
    wanted = meter.now()["peak_memory_bytes"] + 4 * params  # fp32 gradients, which the plain loop has all at once
    free, _ = room(device)
    if device.type == "cuda":
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if wanted > free:
        return f"it takes about {gib(wanted)} beside the engine, and {gib(free)} are free; take a smaller micro-batch"
    return None


def _compared(asked: _Asked, own: Iterator[Step], rounds: int, load: Load) -> Comparison:
    model = asked.model()
    ahead = asked.fed(model)
    plain = plain_steps(model, asked.family, asked.strategy, asked.objective, lambda: next(ahead), asked.device)
    for _ in range(STEPS):  # as the engine has taken
        next(plain)
    losses: dict[str, float] = {}

    def turn(name: str, steps: Iterator[Step]) -> float:
        step = next(steps)
        losses[name] = step.loss
        return step.seconds

    turns = {name: functools.partial(turn, name, steps) for name, steps in (("plain PyTorch", plain), ("bigdit", own))}
    strategy = asked.strategy
    accumulated = f" × {strategy.grad_accum_steps}" if strategy.grad_accum_steps > 1 else ""
    return Comparison(
        what=f"a step of {asked.spec.name}, {strategy.precision}, {strategy.optimizer.name}, micro-batch "
        f"{strategy.micro_batch_size}{accumulated}: the run's, and that of a plain loop",
        load=load,
        contenders=tuple(take_turns(turns, rounds)),
        notes=(f"losses after {rounds + STEPS} steps: {' and '.join(f'{losses[name]:.6g}' for name in turns)}",),
    )


def _receipt(asked: _Asked, meter: MemoryMeter, seconds: list[float]) -> Receipt:
    strategy, measured, predicted = asked.strategy, meter.peak_allocated_bytes, _predicted(asked, meter)
    off = None
    if predicted is not None and measured is not None:
        off = round(100 * (predicted.peak_allocated_bytes - measured) / measured, 4)
    median = statistics.median(seconds[STEPS:])
    return Receipt(
        kind="bench",
        model=asked.spec,
        batch=asked.shape,
        buckets=1,
        strategy=strategy,
        objective=asked.objective,
        device=meter.device_name,
        emulated=meter.emulated,
        expandable_segments=meter.expandable_segments,
        compute_capability=meter.compute_capability,
        gpus_per_node=1,
        steps=len(seconds),
        seconds=round(sum(seconds), 3),
        seconds_per_step=round(median, 5),
        samples_per_second=round(strategy.global_batch_size / median, 2),
        predicted_peak_allocated_bytes=None if predicted is None else predicted.peak_allocated_bytes,
        predicted_peak_reserved_bytes=None if predicted is None else predicted.peak_reserved_bytes,
        measured_peak_allocated_bytes=measured,
        measured_peak_reserved_bytes=meter.peak_reserved_bytes,
        measured_with=meter.method,
        error_percent=off,
    )
