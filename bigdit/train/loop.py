"""The training loop, from the store to the last checkpoint."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bigdit import checkpoint, log, optim, receipt
from bigdit.config.run import CHECKPOINTS, EMA_SNAPSHOTS, EXPORTS, RECEIPT, RunConfig, receipt_of
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.loader.order import step_seed
from bigdit.loader.stages import data_state
from bigdit.models.equip import CompiledGraphs, compile_errors
from bigdit.shortage import memory_errors
from bigdit.train.data import TrainData, largest_batch_shape, open_data
from bigdit.train.measure import STEPS as MEASURED_STEPS
from bigdit.train.monitor.metrics import Metrics
from bigdit.train.monitor.monitor import Monitor, open_monitor
from bigdit.train.oom_fallback import Recovery
from bigdit.train.prepare import Prepared, log_lines
from bigdit.train.processes.alike import ReplicaCheck, check_alike
from bigdit.train.processes.process import output_lock, process_group
from bigdit.train.processes.stop import Stop, Stopped, ending_together
from bigdit.train.record import RunRecord
from bigdit.train.resume import Start, start_of
from bigdit.train.saves import Saves, export_due, export_missed
from bigdit.train.state import TrainState, build_state, shape_errors
from bigdit.train.step import train_step

# Advice for running out of memory outside of a step. On a GPU, a step that does so is repeated with less.
_LESS = {
    "cuda": "it was in no step, so a smaller step does not help; `bigdit plan` finds what fits: an optimizer with "
    "less state, strategy.lora, CPU offload, more GPUs",
    "cpu": "a smaller strategy.micro_batch_size takes less, or strategy.checkpointed_blocks all",
}


FIRST_STEP_S = 600.0
"""The least seconds that a process waits for another before the first step is done: loading and compiling take
long."""


@dataclass(frozen=True)
class Ended:
    """How a training ended: with `checkpoint` after `step` steps; `trained` is False if all had been taken before.

    `following`: the number of the next stage, None after the last one. `store`: several processes use it to restart
    for that stage.
    """

    checkpoint: Path
    step: int
    trained: bool
    following: int | None = None
    store: dist.Store | None = None


def train(stages: Sequence[Prepared], world: World, stop: Stop) -> Ended:
    """Train the stage of the output's latest checkpoint, or the first stage, to its end.

    The stages were checked before. Raises UserError before the first step for an output in use, a store of other
    encoders, or a checkpoint of another model. Raises Stopped after a signal.
    """
    run, needed = stages[0].run, stages[0].strategy.engine != "single"
    on_host = any(each.strategy.cpu_offload for each in stages)
    timeout = max(run.train.timeout, FIRST_STEP_S)
    with (
        process_group(world, needed=needed, on_host=on_host, timeout=timeout, meeting=run.train.timeout) as device,
        ending_together(world, stop, timeout),
        output_lock(run.output, world),
        memory_errors("training", device, _LESS[device.type]),
        compile_errors(),
    ):
        check_alike(stages, world, device)
        if world.is_main:
            for folder in (run.output, *(run.output / each for each in (CHECKPOINTS, EMA_SNAPSHOTS, EXPORTS))):
                checkpoint.remove_unfinished(folder)
        start = start_of(stages)
        log_lines(world, start.notices)
        if start.found is not None and start.done is not None:
            return _nothing_left(start, start.found, start.done, world)
        data, notices = open_data(start, device)
        log_lines(world, notices, notes=True)

        began = time.perf_counter()
        with ExitStack() as stack:
            state = build_state(start, data, world, device, stack)
            last = _steps(start, data, state, stop, began)
        stage = start.stage
        following = None if stage.end == start.ends[-1] else stage.number + 1
        store = None
        if world.world_size > 1:
            store = dist.PrefixStore("bigdit", dist.distributed_c10d._get_default_store())
        return Ended(last, stage.end, trained=True, following=following, store=store)


def _nothing_left(start: Start, found: checkpoint.Checkpoint, done: str, world: World) -> Ended:
    """Write the export that an interrupted run left out, and log that all steps were taken."""
    run = start.stage.run
    log_lines(world, [done])
    if world.is_main:
        export_missed(run, start.ends, found)
    if not (path := run.output / RECEIPT).exists():
        log_lines(world, [f"{path} is missing: the run was interrupted before it was written"], notes=True)
    return Ended(found.folder, start.step, trained=False)


def _steps(start: Start, data: TrainData, state: TrainState, stop: Stop, began: float) -> Path:
    """Take the steps of the current stage; returns its last checkpoint. Raises Stopped after a signal."""
    stage, strategy = start.stage, state.strategy
    run, world, meter = stage.run, state.peers.world, state.meter
    trained = state.engine, state.family, state.objective
    if stage.count > 1:
        log_lines(world, [f"{stage.name}: steps {stage.start + 1} to {stage.end} of {start.ends[-1]}"])
    stream, encode = data.stream(stage, strategy, world, meter.device), data.encode(strategy)
    with ExitStack() as stack:
        monitor = open_monitor(start, data, stream, state, stack)
        steps = stack.enter_context(closing(stream.steps(start.step, stage.end)))
        record = _record(start, state)
        every = None if meter.emulated else run.train.compare_replicas_every  # an emulated GPU computes nothing
        replicas = ReplicaCheck(state.engine, state.ema, state.peers, every)
        stop.begin(start.step)  # the process groups so far are training's own
        saves = _saves(start, data, state, monitor.metrics, record, stack)
        recovery = stack.enter_context(Recovery(run, meter, state.fallback, state.smaller, state.peers, saves, stop))
        _keep(world, record)
        cut: list[str] = []
        graphs = CompiledGraphs(strategy)
        for step in range(start.step, stage.end):
            with monitor.metrics.waiting_for_data():
                micro_batches = next(steps)
            lr = learning_rate(run, step - stage.start)
            torch.manual_seed(step_seed(run.train.seed, step))  # for the rounding of bf16_sr
            graphs.begin()
            with shape_errors(run), recovery.step(step):
                result = train_step(*trained, micro_batches, lr=lr, ema=state.ema, phase=meter.phase, encode=encode)
            meter.end_step()
            done = step + 1
            sizes = [(strategy.step_size, *(each.shape for each in batch.tensors())) for batch in micro_batches]
            log_lines(world, graphs.lines(done, sizes), notes=True)
            monitor.add(done, optim.effective_lr(state.engine.optimizer, lr), result, micro_batches)
            if not cut and (cut := data.cut_here()):
                log_lines(world, cut, notes=True)
            del micro_batches  # frees them before the next ones are read
            if done == start.step + 1:
                stop.answer_within(run.train.timeout)
            if done == start.step + MEASURED_STEPS:
                _keep(world, record.model_copy(update={"measured": meter.measured}))
                log_lines(world, _compare_with_plan(state))
            signum = stop.asked(done)
            whole, snapshot = saves.due(done) or signum, saves.snapshot_due(done)
            replicas.add(done, saved=bool(whole or snapshot))
            if whole:
                saves.save(done)
            elif snapshot:
                saves.snapshot(done)
            if signum and done < start.ends[-1]:
                raise Stopped(signum, done, _saved(saves, done))
        stop.answer_within(max(run.train.timeout, FIRST_STEP_S))  # the main process still decodes images
        last = _saved(saves, stage.end)
        log_lines(world, data.cut(state.peers, strategy.cp), notes=True)
        if world.is_main:
            monitor.sum_up(stage.end - start.step, strategy.global_batch_size)
            write_receipt(start, data, state, monitor, began)
    return last


def _compare_with_plan(state: TrainState) -> list[str]:
    """A line that compares measured and planned memory, if both are known."""
    measured, planned = state.meter.measured, state.planned
    if planned is None or measured is None or measured.peak_reserved_bytes is None:
        return []
    return [planned.compared(measured.peak_reserved_bytes)]


def _record(start: Start, state: TrainState) -> RunRecord:
    stage = start.stage
    return RunRecord(
        start=start.step,
        model=stage.spec,
        strategy=state.strategy,
        run=stage.run.model_copy(update={"objective": state.objective}),
        device=state.meter.device_name,
        emulated=state.meter.emulated,
        out_of_memory=state.fallback.events,
        planned=state.planned,
        stage=stage.number if stage.count > 1 else None,
        steps=start.ends[-1],
    )


def _saves(
    start: Start, data: TrainData, state: TrainState, metrics: Metrics, record: RunRecord, stack: ExitStack
) -> Saves:
    stage = start.stage
    run = stage.run
    described = {
        **record.model_dump(mode="json", include={"model", "strategy", "run"}),
        "data": data_state(data.store, data.order, run.train.seed).model_dump(mode="json"),
    }
    keeping = checkpoint.Keeping(run.train.keep_checkpoints, run.train.keep_every)
    peers = checkpoint.Peers(state.peers.world)  # for the saving thread alone: training uses the other meanwhile
    export = functools.partial(export_due, run, start.ends)
    saver = stack.enter_context(checkpoint.Saver(run.output, peers, keeping, found=start.found, then=export))
    return Saves(run, state.engine, state.ema, saver, metrics, described, start.step, stage.end)


def _saved(saves: Saves, step: int) -> Path:
    """The checkpoint after `step` steps, at least one."""
    last = saves.save_now(step)
    assert last is not None
    return last


def _keep(world: World, record: RunRecord) -> None:
    """Write run.json for the run's page. An error is only logged."""
    if world.is_main:
        try:
            record.write()
        except UserError as error:
            log.notice(f"note: {error}; training continues, and the run's page will lack it")


def learning_rate(run: RunConfig, step: int) -> float:
    """The learning rate of step number `step` (from 0): linear warm-up to the optimizer's lr, then train.lr_schedule.

    Source: Loshchilov & Hutter, arXiv:1608.03983, equation 5, without restarts (cosine); Hägele et al.,
    arXiv:2405.18392, the cooldown "1 − sqrt" (wsd).
    """
    train, peak = run.train, run.strategy.optimizer.lr
    if step < train.warmup_steps:
        return peak * (step + 1) / train.warmup_steps
    steps = train.known_steps
    fall = {"constant": 0, "cosine": steps - train.warmup_steps, "wsd": train.decay_steps or 0}[train.lr_schedule]
    past = step - (steps - fall)
    if past <= 0:
        return peak
    done = past / fall
    left = 0.5 * (1 + math.cos(math.pi * done)) if train.lr_schedule == "cosine" else 1 - math.sqrt(done)
    return train.min_lr + (peak - train.min_lr) * left


def write_receipt(start: Start, data: TrainData, state: TrainState, monitor: Monitor, began: float) -> None:
    """Write the receipt of the stage's steps since the start. `began`: time.perf_counter() at the start."""
    stage, strategy, meter = start.stage, state.strategy, state.meter
    path = stage.run.output / (RECEIPT if stage.end == start.ends[-1] else receipt_of(stage.number))
    steps, seconds = stage.end - start.step, time.perf_counter() - began
    seconds_per_step = monitor.metrics.seconds_per_step
    planned = None if meter.measured is None else state.planned  # there is nothing to compare with
    written = receipt.Receipt(
        kind="train",
        model=stage.spec,
        batch=largest_batch_shape(data.store),
        buckets=len(data.store.buckets),
        strategy=strategy,
        objective=state.objective,
        gpus_per_node=min(strategy.world_size, torch.cuda.device_count() or strategy.world_size),
        steps=steps,
        skipped_steps=monitor.skipped.count,
        out_of_memory=state.fallback.events,
        seconds=round(seconds, 3),
        seconds_per_step=seconds_per_step,
        samples_per_second=round(strategy.global_batch_size / (seconds_per_step or seconds / steps), 2),
        predicted_peak_allocated_bytes=None if planned is None else planned.peak_allocated_bytes,
        predicted_peak_reserved_bytes=None if planned is None else planned.peak_reserved_bytes,
        **meter.receipt_fields(),
    )
    receipt.write(written, path)
    log.notice(f"wrote {path}")
