"""The training loop: one flat pass from the store to the last checkpoint."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import nn

from bigdit import checkpoint, engines, log, models, receipt
from bigdit.checkpoint.folder import CHECKPOINTS
from bigdit.config import RunConfig
from bigdit.config.plan_file import PlanFile
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.features import FeatureStore
from bigdit.features.fit import latent_misfits, plan_misfits, run_misfits, smaller_than_planned, text_misfits
from bigdit.loader.stages import data_state, plan_order
from bigdit.loader.stream import FeatureStream
from bigdit.spec import BatchShape, ModelSpec, Strategy
from bigdit.train import exports
from bigdit.train.lock import held
from bigdit.train.measure import MemoryMeter
from bigdit.train.metrics import FILE, Metrics
from bigdit.train.peers import ending_together
from bigdit.train.process import process_group
from bigdit.train.samples import Samples
from bigdit.train.schedule import learning_rate
from bigdit.train.skipped import SkippedSteps
from bigdit.train.step import train_step
from bigdit.train.stop import Stop, Stopped

RECEIPT = "receipt.json"


def train(
    run: RunConfig, spec: ModelSpec, strategy: Strategy, world: World, stop: Stop, *, plan: PlanFile | None = None
) -> Path:
    """Train to `train.steps`, going on from the output's latest checkpoint; returns the last checkpoint.

    The pieces were checked against each other before; what is found only now (an output in use, a store of other
    encoders, a checkpoint of another model) raises UserError before the first step. Raises Stopped where `stop` says.
    """
    needed, on_host = strategy.engine != "single", strategy.cpu_offload
    with (
        process_group(world, needed=needed, on_host=on_host, timeout=run.engine.timeout) as device,
        ending_together(world, stop),
        held(run.output, world),
    ):
        return _train(run, spec, strategy, world, stop, device, plan)


def _train(
    run: RunConfig,
    spec: ModelSpec,
    strategy: Strategy,
    world: World,
    stop: Stop,
    device: torch.device,
    plan: PlanFile | None,
) -> Path:
    store = FeatureStore.open(run.data.features, run.data.reader, run.data.remote_cache)
    _check_store(store, run, spec, plan)
    for folder in (run.output, run.output / CHECKPOINTS, run.output / exports.FOLDER) if world.is_main else ():
        checkpoint.remove_unfinished(folder)
    found, notices = checkpoint.latest(run.output)
    if found is not None:
        checkpoint.check_resumable(found, spec, strategy)
    start = found.step if found else 0
    _say(world, notices)
    if found is not None and start >= run.train.steps:
        _say(world, [f"{found.folder} has its {start} steps already; raise train.steps to go on"])
        if world.is_main:
            exports.export_missed(run, found)
        if not (run.output / RECEIPT).exists():
            _say(world, [f"note: {run.output / RECEIPT} is missing: the run was interrupted before it was written"])
        return found.folder

    saved, where = (found.state.get("data"), found.folder) if found else (None, run.output)
    order, notices = plan_order(store, strategy.global_batch_size, run.train.seed, saved, start, where)
    notices += smaller_than_planned(plan, store.buckets) if plan is not None else []
    _say(world, [f"note: {line}" for line in notices])

    began = time.perf_counter()
    with ExitStack() as stack:
        family = models.family(spec.class_name)
        peers = checkpoint.Peers(world)
        if found is not None:
            checkpoint.verify(found, peers)
            if world.is_main:
                exports.export_missed(run, found)
        model = models.equip(_weights(run, spec, strategy, found), family, strategy, seed=run.train.seed)
        if found is not None:
            checkpoint.load_weights(found, model)
        meter = stack.enter_context(MemoryMeter(device))
        meter.loaded(model)
        engine = engines.create(strategy, model, family, device=device, world=world)
        ema = engines.ema_of(engine)
        if found is not None:
            _say(world, checkpoint.restore(found, engine, peers, ema))
            _say(world, [f"going on from {found.folder}, step {start}"])
        stream = FeatureStream(
            store,
            world,
            order,
            micro_batch_size=strategy.micro_batch_size,
            grad_accum_steps=strategy.grad_accum_steps,
            seed=run.train.seed,
            caption_dropout=run.data.caption_dropout,
            read_ahead_steps=strategy.read_ahead_steps,
            threads=run.data.read_threads,
            pin_memory=device.type == "cuda",
        )
        meter.watch(engine, ema)
        end, images = run.train.steps, strategy.global_batch_size
        samples = Samples(store, stream)
        skipped = SkippedSteps(engine, peers, samples, run.train.most_skipped_steps)
        names = samples.of_step
        metrics = stack.enter_context(
            Metrics(
                run.output,
                world,
                device,
                start=start,
                stop=end,
                images=images,
                name_samples=names,
                written=found.state["metrics"] if found else None,
            )
        )
        steps = stack.enter_context(closing(stream.steps(start, end, meter.held)))
        keeping = checkpoint.Keeping(run.train.keep_checkpoints, run.train.keep_every)
        export = functools.partial(exports.export_due, run)
        saver = stack.enter_context(checkpoint.Saver(run.output, peers, keeping, found=found, then=export))
        stop.begin(start, run.engine.timeout)
        for step in range(start, end):
            micro_batches = next(steps)
            lr = learning_rate(run, step)
            with meter.step(micro_batches) as (batches, phase):
                result = train_step(engine, family, run.objective, batches, lr=lr, ema=ema, phase=phase)
            metrics.add(step, lr, result)
            skipped.add(step, lr, result, micro_batches)
            del micro_batches, batches  # or they would live on while the next ones are read
            asked = stop.asked(step + 1)
            if (step + 1) % run.train.checkpoint_every == 0 or step + 1 == end or asked:
                metrics.flush()
                described = {
                    "model": spec.model_dump(mode="json"),
                    "strategy": strategy.model_dump(mode="json"),
                    "run": run.model_dump(mode="json"),
                    "metrics": metrics.digest,
                    "data": data_state(store, order, run.train.seed).model_dump(mode="json"),
                }
                saver.save(engine, ema, step + 1, described)
            if asked and step + 1 < end:
                saver.wait()
                assert saver.last is not None
                raise Stopped(asked, step + 1, saver.last)
        saver.wait()
        if world.is_main:
            if skipped.count:
                log.notice(f"note: {skipped.count} of {end - start} steps were skipped; {run.output / FILE} says which")
            seconds = time.perf_counter() - began
            _write_receipt(run, spec, strategy, store, meter, metrics.seconds_per_step, end - start, seconds)
    assert saver.last is not None
    return saver.last


def _say(world: World, lines: Sequence[str]) -> None:
    for line in lines if world.is_main else ():
        log.notice(line)


def _check_store(store: FeatureStore, run: RunConfig, spec: ModelSpec, plan: PlanFile | None) -> None:
    """Raise UserError where the store's features are not what this model takes, the run says and the plan is for."""
    null = store.null_text
    pooled_dim = None if null.pooled is None else len(null.pooled)
    problems = [
        *(f"its latents have {misfit}" for misfit in latent_misfits(spec, next(iter(store.buckets))[0])),
        *(f"its text has {misfit}" for misfit in text_misfits(spec, null.states.shape[1], pooled_dim)),
        *run_misfits(run, store.schema),
        *(plan_misfits(plan, store.buckets, store.max_tokens) if plan is not None else ()),
    ]
    encoder, asked = store.schema.text_encoder, run.encoders.text.tokens_asked
    most = encoder.get("max_sequence_length", encoder["max_tokens"])
    if asked not in (None, most):
        problems.append(f"its text has at most {most} tokens, and encoders.text.max_tokens is {asked}")
    if problems:
        raise UserError(*(f"data.features: {store.root} does not fit: {problem}" for problem in problems))


def _weights(run: RunConfig, spec: ModelSpec, strategy: Strategy, found: checkpoint.Checkpoint | None) -> nn.Module:
    """The plain model on the host: empty where a checkpoint fills all of it, else from init_from, or drawn."""
    dtype, source = engines.compute_dtype(strategy), run.model.init_from
    if found is not None and strategy.lora is None:
        return models.skeleton(spec, dtype=dtype)
    if source is not None:
        return checkpoint.load_model(spec, source, dtype=dtype)
    return models.build(spec, device="cpu", dtype=dtype, seed=run.train.seed)


def _write_receipt(
    run: RunConfig,
    spec: ModelSpec,
    strategy: Strategy,
    store: FeatureStore,
    meter: MemoryMeter,
    seconds_per_step: float | None,
    steps: int,
    seconds: float,
) -> None:
    path = run.output / RECEIPT
    written = receipt.Receipt(
        kind="train",
        model=spec,
        batch=largest_batch_shape(store),
        buckets=len(store.buckets),
        strategy=strategy,
        objective=run.objective,
        device=meter.device_name,
        emulated=meter.emulated,
        compute_capability=meter.compute_capability,
        gpus_per_node=min(strategy.world_size, torch.cuda.device_count() or strategy.world_size),
        steps=steps,
        seconds=round(seconds, 3),
        seconds_per_step=seconds_per_step,
        images_per_second=round(strategy.global_batch_size / (seconds_per_step or seconds / steps), 2),
        measured_peak_allocated_bytes=meter.peak_allocated_bytes,
        measured_peak_reserved_bytes=meter.peak_reserved_bytes,
        measured_with=meter.method,
    )
    receipt.write(written, path)
    log.notice(f"wrote {path}")


def largest_batch_shape(store: FeatureStore) -> BatchShape:
    """Shapes of the largest bucket in a feature store, with text of its max_tokens."""
    latents = max(store.buckets, key=math.prod)
    wide = store.has_deviation or store.latents_dtype == torch.float32
    text = (store.max_tokens, store.null_text.states.shape[1])
    return BatchShape(latents=latents, latents_dtype="fp32" if wide else "bf16", text=text)
