"""A run's step in one process: its memory, predicted and measured; its time, interleaved with a plain loop's."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigdit import catalog, engines, log, objectives, optim
from bigdit.bench import Comparison, MachineLoad, take_turns
from bigdit.dist import World
from bigdit.engines.ema import shares_of_new
from bigdit.errors import UserError
from bigdit.loader.batch import Batch
from bigdit.objective_spec import ObjectiveSpec
from bigdit.profile.attempt import Attempt, StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.pool import WorkerError
from bigdit.profile.steps import Workload, build, prepare, step_batches
from bigdit.receipt import Receipt
from bigdit.shortage import room
from bigdit.strategy import BatchShape, ModelSpec, Strategy
from bigdit.train.measure import STEPS, MemoryMeter
from bigdit.train.processes.process import process_group
from bigdit.train.step import train_step
from bigdit.units import gib


@dataclass(frozen=True)
class StepBench:
    """The receipt of a step. `compared`: with the plain loop; None for the reason in `alone`."""

    receipt: Receipt
    compared: Comparison | None
    alone: str | None


@dataclass(frozen=True)
class TimedStep:
    """The seconds of a step, until its loss was computed, and the loss."""

    seconds: float
    loss: float


def bench_step(
    spec: ModelSpec, shape: BatchShape, strategy: Strategy, objective: ObjectiveSpec, *, steps: int, seed: int
) -> StepBench:
    """Measure peak bytes of two steps, and the seconds of the others, up to `steps`.

    They are interleaved with a plain loop's where a second model fits. On a GPU an emulated one predicts the peaks.
    """
    load = MachineLoad.now()
    with process_group(World(), needed=False) as device:
        request = StepRequest(model=spec, batch=shape, strategy=strategy, objective=objective)
        workload = prepare(request, build(request, seed))
        meter = MemoryMeter(device)
        own = _own_steps(workload, device, meter)
        seconds = [next(own).seconds for _ in range(STEPS)]
        alone = _obstacle(meter, device, workload.params)
        compared = (
            None if alone else _compared(prepare(request, build(request, seed)), device, own, steps - STEPS, load)
        )
        seconds += compared.contenders[1].rounds if compared else [next(own).seconds for _ in range(steps - STEPS)]
    return StepBench(_receipt(request, meter, seconds), compared, alone)


def _predicted(request: StepRequest, meter: MemoryMeter) -> Attempt | None:
    """The same steps on an emulated GPU; None on a CPU, or if they cannot run there, which is logged."""
    if meter.device_name == "cpu":
        return None
    try:
        gpu = catalog.resolve_gpu(meter.device_name)
        with EmulatedGpus(gpu, 1, expandable_segments=meter.expandable_segments) as runner:
            return runner.attempt(request)
    except (UserError, WorkerError) as error:
        log.notice(f"note: memory is not predicted: {error}")
        return None


def _micro_batches(workload: Workload, device: torch.device) -> Iterator[list[Any]]:
    """Micro-batches of zeros for each step, as the loader makes them."""
    return step_batches(workload.make, workload.request.strategy, pin=device.type == "cuda")


def _own_steps(workload: Workload, device: torch.device, meter: MemoryMeter) -> Iterator[TimedStep]:
    """Endless steps of the trainer. The meter measures the first ones."""
    request, family = workload.request, workload.family
    engine = engines.create(request.strategy, workload.model, family, device=device)
    ema = engines.ema_of(engine)
    lr, ahead = request.strategy.optimizer.lr, _micro_batches(workload, device)
    while True:
        micro_batches = next(ahead)
        began = time.perf_counter()
        result = train_step(engine, family, request.objective, micro_batches, lr=lr, ema=ema, phase=meter.phase)
        meter.end_step()
        loss = float(result.loss)  # waits for the device
        taken = TimedStep(time.perf_counter() - began, loss)
        del result, micro_batches  # else they would stay allocated in the next step
        yield taken


def _obstacle(meter: MemoryMeter, device: torch.device, params: int) -> str | None:
    """Why no plain loop can run in addition to the engine; None where it can."""
    if meter.emulated:
        return "an emulated GPU runs no kernels, so its seconds mean nothing"
    needed = meter.now()["peak_memory_bytes"] + 4 * params  # the plain loop has all fp32 gradients at once
    free, _ = room(device)
    if device.type == "cuda":
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > free:
        return f"it needs about {gib(needed)} in addition, and {gib(free)} are free; use a smaller micro-batch"
    return None


def _compared(
    workload: Workload, device: torch.device, own: Iterator[TimedStep], rounds: int, load: MachineLoad
) -> Comparison:
    plain = plain_steps(workload, _micro_batches(workload, device), device)
    for _ in range(STEPS):  # the engine has taken as many
        next(plain)
    losses: dict[str, float] = {}

    def turn(name: str, steps: Iterator[TimedStep]) -> float:
        step = next(steps)
        losses[name] = step.loss
        return step.seconds

    turns = {name: functools.partial(turn, name, steps) for name, steps in (("plain PyTorch", plain), ("bigdit", own))}
    strategy = workload.request.strategy
    accumulated = f" × {strategy.grad_accum_steps}" if strategy.grad_accum_steps > 1 else ""
    return Comparison(
        what=f"a step of {workload.request.model.name}, {strategy.precision}, {strategy.optimizer.name}, micro-batch "
        f"{strategy.micro_batch_size}{accumulated}: the run's, and that of a plain loop",
        load=load,
        contenders=tuple(take_turns(turns, rounds)),
        notes=(f"losses after {rounds + STEPS} steps: {' and '.join(f'{losses[name]:.6g}' for name in turns)}",),
    )


def plain_steps(workload: Workload, batches: Iterator[Sequence[Batch]], device: torch.device) -> Iterator[TimedStep]:
    """Endless steps of a plain PyTorch loop, without an engine.

    bf16 and fp16 have fp32 masters, whose gradients all exist at once. torch's GradScaler scales fp16. The optimizer
    always steps after the backward pass.
    """
    request, strategy = workload.request, workload.request.strategy
    dtype, mixed = engines.compute_dtype(strategy), strategy.precision in ("bf16", "fp16")
    model, family = workload.model.to(device), workload.family
    params = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().float() for param in params] if mixed else params
    grouped = optim.groups(strategy.optimizer, model, masters, blocks=family.blocks(model))
    optimizer = optim.build(strategy.optimizer, grouped, stochastic_rounding=strategy.precision == "bf16_sr")
    scaler = torch.amp.GradScaler(device.type, enabled=strategy.precision == "fp16")
    ema = strategy.ema
    place = torch.device("cpu") if ema is not None and ema.device == "cpu" else device
    averages = [
        [master.detach().to(place, torch.float32, copy=True) for master in masters]
        for _ in range(0 if ema is None else ema.count)
    ]
    for update, micro_batches in enumerate(batches, start=1):
        began, total = time.perf_counter(), torch.zeros((), device=device)
        for host_batch in micro_batches:
            batch = host_batch.to(device, dtype)

            def predict(latents: torch.Tensor, t: torch.Tensor, batch: Batch = batch) -> torch.Tensor:
                return family.predict(model, latents, t, batch)

            tokens = family.tokens(model, batch.latents.shape)
            loss = objectives.loss(request.objective, predict, batch.latents, batch.seeds, dtype, tokens)
            loss = loss / len(micro_batches)
            scaler.scale(loss).backward()
            total += loss.detach()
        if mixed:
            for param, master in zip(params, masters, strict=True):
                master.grad, param.grad = None if param.grad is None else param.grad.float(), None
        scaler.unscale_(optimizer)
        if strategy.gradient_clipping is not None:
            nn.utils.clip_grad_norm_(masters, strategy.gradient_clipping)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            if mixed:
                torch._foreach_copy_(params, masters)
            if ema is not None:
                for each, share in zip(averages, shares_of_new(ema, update), strict=True):
                    for average, master in zip(each, masters, strict=True):
                        average.lerp_(master.to(place, torch.float32), share)
        seen = float(total)  # waits for the device
        yield TimedStep(time.perf_counter() - began, seen)


def _receipt(request: StepRequest, meter: MemoryMeter, seconds: list[float]) -> Receipt:
    strategy, measured, predicted = request.strategy, meter.measured, _predicted(request, meter)
    off = None
    if predicted is not None and measured is not None:
        allocated = measured.peak_allocated_bytes
        off = round(100 * (predicted.peak_allocated_bytes - allocated) / allocated, 4)
    median = statistics.median(seconds[STEPS:])
    return Receipt(
        kind="bench",
        model=request.model,
        batch=request.batch,
        buckets=1,
        strategy=strategy,
        objective=request.objective,
        gpus_per_node=1,
        steps=len(seconds),
        seconds=round(sum(seconds), 3),
        seconds_per_step=round(median, 5),
        samples_per_second=round(strategy.global_batch_size / median, 2),
        predicted_peak_allocated_bytes=None if predicted is None else predicted.peak_allocated_bytes,
        predicted_peak_reserved_bytes=None if predicted is None else predicted.peak_reserved_bytes,
        error_percent=off,
        **meter.receipt_fields(),
    )
