"""The training loop: one flat pass from the store to the last checkpoint."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigdit import checkpoint, engines, log, models
from bigdit.catalog.classes import no_class
from bigdit.catalog.families import objective_of
from bigdit.config import RunConfig
from bigdit.config.output import AVERAGES, CHECKPOINTS, EXPORTS, RECEIPT, receipt_of
from bigdit.dist import World
from bigdit.encoders.fit import smaller_than_planned
from bigdit.errors import UserError
from bigdit.loader.online import RunEncoders, more_than_planned, open_online
from bigdit.loader.order import step_seed
from bigdit.loader.raw_store import RawStore
from bigdit.loader.stages import data_state
from bigdit.loader.stream import FeatureStream
from bigdit.models.compiling import compiling_said, compiling_told
from bigdit.shortage import told
from bigdit.spec import ModelSpec, Strategy
from bigdit.store import FeatureStore
from bigdit.train import exports
from bigdit.train.beside_plan import planned_memory
from bigdit.train.encode import encode
from bigdit.train.going_on import start_of
from bigdit.train.measure import STEPS as MEASURED_STEPS
from bigdit.train.measure import MemoryMeter
from bigdit.train.metrics import Metrics
from bigdit.train.mfu import mfu_of
from bigdit.train.model import telling_shapes
from bigdit.train.out_of_memory import Recovery
from bigdit.train.prepare import Prepared
from bigdit.train.processes.lock import held
from bigdit.train.processes.peers import ending_together
from bigdit.train.processes.process import process_group
from bigdit.train.processes.stop import Stop, Stopped
from bigdit.train.record import RunRecord
from bigdit.train.relief import read_relief, relieved
from bigdit.train.samples import Samples
from bigdit.train.saves import Saves, snapshots_said
from bigdit.train.schedule import learning_rate
from bigdit.train.seen.pictures import Pictures
from bigdit.train.seen.trackers import Trackers
from bigdit.train.seen.validation import Validation
from bigdit.train.skipped import SkippedSteps
from bigdit.train.step import train_step
from bigdit.train.store import open_stores
from bigdit.train.written import write_receipt

# On a card, steps are taken again with less: what comes here ran out before the first one, or between two.
_LESS = {
    "cuda": "it was in no step, and a smaller one does not mend it; `bigdit plan` says what fits: an optimizer with "
    "less state, train.lora, offload to the host, more cards",
    "cpu": "a smaller train.micro_batch_size takes less, or train.checkpointed_blocks all",
}


@dataclass(frozen=True)
class Ended:
    """How a training ended: its last `checkpoint`, of `step` steps, and whether it `trained`, or had all before; the
    number of the stage that is `following`, None at the end of all; and the `store` by which several processes agree to
    start again for it."""

    checkpoint: Path
    step: int
    trained: bool
    following: int | None = None
    store: dist.Store | None = None


def train(stages: Sequence[Prepared], world: World, stop: Stop) -> Ended:
    """Train the stage that the output's latest checkpoint belongs to, or the first, to its end.

    The pieces were checked against each other before; what is found only now (an output in use, a store of other
    encoders, a checkpoint of another model) raises UserError before the first step. Raises Stopped where `stop` says.
    """
    run, needed = stages[0].stage.run, stages[0].strategy.engine != "single"
    on_host = any(each.strategy.cpu_offload for each in stages)
    with (
        process_group(world, needed=needed, on_host=on_host, timeout=run.engine.timeout) as device,
        ending_together(world, stop),
        held(run.output, world),
        told("training", device, _LESS[device.type]),
        compiling_told(),
    ):
        ended = _train(stages, world, stop, device)
        if world.world_size == 1:
            return ended
        return replace(ended, store=dist.PrefixStore("bigdit", dist.distributed_c10d._get_default_store()))


def _train(stages: Sequence[Prepared], world: World, stop: Stop, device: torch.device) -> Ended:
    output, ends = stages[0].stage.run.output, [each.stage.end for each in stages]
    for folder in (output, *(output / each for each in (CHECKPOINTS, AVERAGES, EXPORTS))) if world.is_main else ():
        checkpoint.remove_unfinished(folder)
    begin = start_of(stages)
    found, start, reached = begin.found, begin.step, begin.reached
    _say(world, begin.notices)
    stage, spec, asked, run, plan = reached.stage, reached.spec, reached.strategy, reached.stage.run, reached.stage.plan
    end, staged = stage.end, stage.count > 1
    objective = objective_of(spec, run.objective)
    if found is not None and begin.done is not None:
        _say(world, [begin.done])
        if world.is_main:
            exports.export_missed(run, ends, found)
        if not (run.output / RECEIPT).exists():
            _say(world, [f"note: {run.output / RECEIPT} is missing: the run was interrupted before it was written"])
        return Ended(found.folder, start, trained=False)

    store, online = _opened(stages, reached, device)
    order, notices = begin.order(store)
    notices += smaller_than_planned(plan, store.buckets) if plan is not None else []
    notices += more_than_planned(plan, online) if plan is not None and online is not None else []
    _say(world, [f"note: {line}" for line in notices])

    began = time.perf_counter()
    with ExitStack() as stack:
        family = models.family(spec.class_name)
        peers = checkpoint.Peers(world)
        (relief, *_) = peers.gather(read_relief(run.output, asked) if world.is_main else None)
        assert relief is not None
        strategy = relief.now
        if found is not None:
            checkpoint.verify(found, peers)
            if world.is_main:
                exports.export_missed(run, ends, found)
        model = models.equip(_weights(run, spec, strategy, found), family, strategy, seed=run.train.seed)
        blocks = len(family.blocks(model))
        _say(world, [f"note: {line}" for line in snapshots_said(run, model)])
        if found is not None:
            checkpoint.load_weights(found, model)
        meter = stack.enter_context(MemoryMeter(device))
        meter.loaded(model, online.tensors() if online else ())
        if strategy.compile_blocks:
            _say(world, [f"note: {compiling_said(device.type, emulated=meter.emulated)}"])
        engine = engines.create(strategy, model, family, device=device, world=world)
        ema = engines.ema_of(engine)
        if found is not None:
            _say(world, [f"note: {line}" for line in checkpoint.restore(found, engine, peers, ema)])
            _say(world, [f"going on from {found.folder}, step {start}"])
        if staged:
            _say(world, [f"{stage.name}: steps {stage.start + 1} to {end} of {ends[-1]}"])
        stream = FeatureStream(
            store,
            world,
            order,
            micro_batch_size=strategy.micro_batch_size,
            grad_accum_steps=strategy.grad_accum_steps,
            seed=run.train.seed,
            caption_dropout=run.data.caption_dropout,
            no_class=no_class(spec),
            read_ahead_steps=strategy.read_ahead_steps,
            threads=run.data.read_threads,
            pin_memory=device.type == "cuda",
        )
        meter.watch(engine, ema)
        encoding = None if online is None else functools.partial(encode, online, strategy.encode_chunk)
        samples = Samples(store, stream)
        skipped = SkippedSteps(engine, peers, samples, run.train.most_skipped_steps)
        settings = run.model_dump(mode="json")
        planned = planned_memory(plan, strategy, device.type)
        trackers = stack.enter_context(Trackers(run.trackers, run.output, start, settings, shown=world.is_main))
        images, names = strategy.global_batch_size, samples.of_step
        metrics = stack.enter_context(
            Metrics(
                run.output,
                peers,
                device,
                start=start,
                stop=end,
                images=images,
                name_samples=names,
                memory=meter.now,
                written=found.state["metrics"] if found else None,
                planned_bytes=None if planned is None else planned.peak_allocated_bytes,
                stage=stage.number if staged else None,
                mfu=mfu_of(spec, family, strategy, device, emulated=meter.emulated) if world.is_main else None,
                trackers=trackers,
            )
        )
        validation = None
        if run.validation is not None and order.held is not None and isinstance(store, FeatureStore):
            measured_by = (peers, engine, ema, family, objective, end)
            validation = Validation(run.validation, store, order.held, *measured_by)
        pictures = None
        if run.samples is not None:
            drawn_by = (peers, engine, ema, family, objective)
            known = store.schema.classes
            pictures = stack.enter_context(Pictures(run.samples, run, spec, known, *drawn_by, end, trackers.show))
        steps = stack.enter_context(closing(stream.steps(start, end, meter.held)))
        keeping = checkpoint.Keeping(run.train.keep_checkpoints, run.train.keep_every)
        saving = checkpoint.Peers(world)  # its thread's own: training speaks with its peers meanwhile
        export = functools.partial(exports.export_due, run, ends)
        saver = stack.enter_context(checkpoint.Saver(run.output, saving, keeping, found=found, then=export))
        record = RunRecord(
            start=start,
            model=spec,
            strategy=strategy,
            run=run.model_copy(update={"objective": objective}),
            device=meter.device_name,
            emulated=meter.emulated,
            out_of_memory=relief.events,
            planned=planned,
            stage=stage.number if staged else None,
            steps=ends[-1],
        )
        described = {
            **record.model_dump(mode="json", include={"model", "strategy", "run"}),
            "data": data_state(store, order, run.train.seed).model_dump(mode="json"),
        }
        saves = Saves(run, engine, ema, saver, metrics, described, start, end)
        stop.begin(start, run.engine.timeout)
        sizes = () if plan is None else (plan.strategy.step_size, *plan.smaller)
        recovery = stack.enter_context(
            Recovery(run, world, device, relief, relieved(strategy, sizes, blocks), peers, saves, stop)
        )
        _keep(world, record)
        for step in range(start, end):
            micro_batches = next(steps)
            lr = learning_rate(run, step - stage.start)
            torch.manual_seed(step_seed(run.train.seed, step))  # bf16_sr rounds by it
            with (
                telling_shapes(run),
                meter.step(micro_batches) as (batches, phase),
                recovery.step(step, phase) as noted,
            ):
                result = train_step(engine, family, objective, batches, lr=lr, ema=ema, phase=noted, encode=encoding)
            done = step + 1
            measured: dict[str, Any] = {}
            if validation is not None and validation.due(done):
                with metrics.aside():
                    measured = validation.measure()
            metrics.add(done, lr, result, micro_batches, measured)
            if pictures is not None and pictures.due(done):
                with metrics.aside():
                    pictures.draw(done)
            skipped.add(done, lr, result, micro_batches)
            del micro_batches, batches  # or they would live on while the next ones are read
            if done == start + MEASURED_STEPS:
                _keep(world, record.model_copy(update={"measured": meter.measured}))
                if planned is not None and meter.peak_reserved_bytes is not None:
                    _say(world, [planned.beside(meter.peak_reserved_bytes)])
            signum = stop.asked(done)
            if saves.due(done) or signum:
                saves.save(done)
            elif saves.snapshot_due(done):
                saves.snapshot(done)
            if signum and done < ends[-1]:
                last = saves.save_now(done)
                assert last is not None
                raise Stopped(signum, done, last)
        last = saves.save_now(end)
        if world.is_main:
            skipped.sum_up(end - start, metrics.path)
            counts = skipped.count, end - start
            name = RECEIPT if end == ends[-1] else receipt_of(stage.number)
            write_receipt(run, spec, strategy, store, meter, planned, metrics, relief, *counts, began, name)
    assert last is not None
    return Ended(last, end, trained=True, following=None if end == ends[-1] else stage.number + 1)


def _opened(
    stages: Sequence[Prepared], reached: Prepared, device: torch.device
) -> tuple[FeatureStore | RawStore, RunEncoders | None]:
    """The store of the stage that was reached; or its pictures, and the encoders on the device, where features are made
    in each step."""
    strategy, stage = reached.strategy, reached.stage
    if strategy.features == "cached":
        return open_stores(stages, stage.number), None
    return open_online(stage.run, reached.spec, stage.plan, device, strategy.encode_chunk or 1)


def _say(world: World, lines: Sequence[str]) -> None:
    for line in lines if world.is_main else ():
        log.notice(line)


def _keep(world: World, record: RunRecord) -> None:
    """For the run's page, for whose sake no run ends."""
    if world.is_main:
        try:
            record.write()
        except UserError as error:
            log.notice(f"note: {error}; training goes on, and its page will lack it")


def _weights(run: RunConfig, spec: ModelSpec, strategy: Strategy, found: checkpoint.Checkpoint | None) -> nn.Module:
    """The plain model on the host: empty where a checkpoint fills all of it, else from init_from, or drawn."""
    dtype, source = engines.compute_dtype(strategy), run.model.init_from
    if found is not None and strategy.lora is None:
        return models.skeleton(spec, dtype=dtype)
    if source is not None:
        return checkpoint.load_model(spec, source, dtype=dtype)
    return models.build(spec, device="cpu", dtype=dtype, seed=run.train.seed)
