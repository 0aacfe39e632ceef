"""Monitors the steps of a stage: metrics, validation loss, validation images, and skipped steps."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from bigdit import log, objectives
from bigdit.checkpoint import Peers
from bigdit.config.run import ValidationConfig
from bigdit.engines import Ema, Engine, compute_dtype
from bigdit.errors import UserError
from bigdit.loader.batch import Batch, CaptionedBatch
from bigdit.loader.online import RawStore
from bigdit.loader.order import ValidationSplit
from bigdit.loader.stream import BatchReader, FeatureStream, Micro
from bigdit.models import Family
from bigdit.objective_spec import FlowMatchingSpec, ObjectiveSpec
from bigdit.store import FeatureStore
from bigdit.train.data import TrainData
from bigdit.train.monitor.images import ValidationImages
from bigdit.train.monitor.metrics import Metrics, finite, mfu_of
from bigdit.train.monitor.trackers import Trackers
from bigdit.train.resume import Start
from bigdit.train.state import TrainState
from bigdit.train.step import StepResult, loss_mask, predict_by
from bigdit.units import how_many


@dataclass(frozen=True)
class Monitor:
    """Monitors the steps of a stage; all processes call it."""

    metrics: Metrics
    skipped: SkippedSteps
    validation: Validation | None
    images: ValidationImages | None

    def sum_up(self, steps: int, samples: int) -> None:
        """Log how many of `steps` steps with `samples` samples each were skipped. The metrics name them."""
        path = self.metrics.path
        if self.skipped.count:
            log.notice(f"note: {self.skipped.count} of {how_many(steps, 'step')} skipped; {path} marks them")
        if count := self.metrics.skipped_samples:
            log.notice(f"note: {count:,} of {how_many(steps * samples, 'sample')} skipped; {path} counts them")

    def add(self, step: int, lr: float, result: StepResult, micro_batches: Sequence[Micro]) -> None:
        """Add the result of step number `step` (from 1) on these micro-batches. Raises UserError if it ends the run."""
        measured: dict[str, Any] = {}
        if self.validation is not None and self.validation.due(step):
            with self.metrics.aside():
                measured = self.validation.measure()
        self.metrics.add(step, lr, result, micro_batches, measured)
        if self.images is not None and self.images.due(step):
            with self.metrics.aside():
                self.images.generate(step)
        self.skipped.add(step, lr, result, micro_batches)


def open_monitor(start: Start, data: TrainData, stream: FeatureStream, state: TrainState, stack: ExitStack) -> Monitor:
    """The monitor of a stream's steps; `stack` closes it. Raises UserError as ValidationImages does."""
    stage, spec, store = start.stage, start.stage.spec, data.store
    run, peers, planned, device = stage.run, state.peers, state.planned, state.engine.device
    samples, is_main = Samples(store, stream), peers.world.is_main
    settings = run.model_dump(mode="json")
    trackers = stack.enter_context(Trackers(run.trackers, run.output, start.step, settings, shown=is_main))
    emulated = state.meter.emulated
    metrics = stack.enter_context(
        Metrics(
            run.output,
            peers,
            device,
            start=start.step,
            stop=stage.end,
            images=state.strategy.global_batch_size,
            name_samples=samples.of_step,
            memory=state.meter.now,
            written=start.found.state["metrics"] if start.found else None,
            planned_bytes=None if planned is None else planned.peak_allocated_bytes,
            stage=stage.number if stage.count > 1 else None,
            mfu=mfu_of(spec, state.family, state.strategy, device, emulated=emulated) if is_main else None,
            trackers=trackers,
            collectives=state.collectives,
            cp=state.strategy.cp,
        )
    )
    model = peers, state.engine, state.ema, state.family, state.objective, stage.end
    validation = images = None
    if run.validation is not None and data.order.validation is not None and isinstance(store, FeatureStore):
        validation = Validation(run.validation, store, data.order.validation, *model)
    if run.samples is not None:
        known = store.schema.classes
        images = stack.enter_context(ValidationImages(run.samples, run, spec, known, state, stage.end, trackers.show))
    skipped = SkippedSteps(state.engine, peers, samples, run.train.most_skipped_steps)
    return Monitor(metrics, skipped, validation, images)


_FIX = "lower strategy.optimizer.lr, lengthen train.warmup_steps, or set strategy.gradient_clipping"
_MEND = "encode these samples again, those of a VAE with encoders.image.dtype fp32, or leave them out"


class SkippedSteps:
    """Counts skipped steps; all processes call it. `most`: how many skipped steps in a row end the run."""

    def __init__(self, engine: Engine, peers: Peers, samples: Samples, most: int) -> None:
        self._engine = engine
        self._peers = peers
        self._samples = samples
        self._most = most
        self._in_a_row = 0
        self.count = 0

    def add(self, step: int, lr: float, result: StepResult, micro_batches: Sequence[Micro]) -> None:
        """As Monitor.add. Raises UserError when `most` steps in a row were skipped.

        In fp16, gradients overflow until the loss scale is low enough: such steps are only counted.
        """
        if result.taken:
            self._in_a_row = 0
            return
        self.count += 1
        found = self._peers.gather((float(result.loss), self._samples.not_finite(step, micro_batches)))
        found = found[:: self._engine.strategy.cp]  # processes that share a sample name the same
        loss = statistics.fmean(each for each, _ in found)
        if math.isfinite(loss) and self._engine.loss_scale > 1:
            return
        self._in_a_row += 1
        ends = self._in_a_row == self._most
        if not self._peers.world.is_main and not ends:
            return
        wrong = list(itertools.chain.from_iterable(names for _, names in found))
        norm = "" if result.grad_norm is None else f", its gradients' norm {float(result.grad_norm):.4g}"
        line = f"the loss of step {step} is {loss:.4g}{norm} at learning rate {lr:.2e}; " + (
            f"values are not finite in {listed(wrong, len(wrong))}" if wrong else self._samples.of_step(step)
        )
        if ends:
            raise UserError(
                f"training skipped {how_many(self._most, 'step')} in a row (train.most_skipped_steps): {line}; "
                + (_MEND if wrong else _FIX)
            )
        log.notice(f"note: step {step} is skipped: {line}")


class Validation:
    """Measures the loss of the validation split `held` with the training engine, in its micro-batches.

    All processes call it, and share the samples. Training does not change: weights and EMA are restored to the bit, and
    random numbers come from the samples' own seeds.
    """

    def __init__(
        self,
        config: ValidationConfig,
        store: FeatureStore,
        held: ValidationSplit,
        peers: Peers,
        engine: Engine,
        ema: Ema | None,
        family: Family,
        objective: ObjectiveSpec,
        last: int,
    ) -> None:
        """`last`: training's last step."""
        self._config, self._store, self._held, self._peers = config, store, held, peers
        self._engine, self._ema, self._family, self._objective = engine, ema, family, objective
        self._last, self._samples = last, int(held.counts.sum())

    def due(self, step: int) -> bool:
        """Whether it is due after `step` steps."""
        return step % self._config.every == 0 or step == self._last

    def measure(self) -> dict[str, Any]:
        """A row's `validation_loss`, `ema_validation_loss` if there is an EMA, and both by t."""
        found = self._losses("validation_loss")
        if self._ema is not None:
            with self._ema.in_place():
                found |= self._losses("ema_validation_loss")
        return found

    def _losses(self, name: str) -> dict[str, Any]:
        low, high = self._objective.t_range if isinstance(self._objective, FlowMatchingSpec) else (0.0, 1.0)
        times = [low + (high - low) * time for time in self._config.times]
        with self._engine.evaluating():
            own = [[self._loss(batch, t) * count for t in times] for batch, count in self._batches()]
        cp = self._engine.strategy.cp  # `cp` processes have the same loss
        rows = itertools.chain.from_iterable(self._peers.gather(own)[::cp])
        means = [math.fsum(losses) / self._samples for losses in zip(*rows, strict=True)]
        by_t = {f"{t:g}": finite(mean) for t, mean in zip(times, means, strict=True)}
        return {name: finite(math.fsum(means) / len(means)), f"{name}_by_t": by_t}

    def _loss(self, batch: Batch, t: float) -> float:
        engine, dtype = self._engine, compute_dtype(self._engine.strategy)
        predict = functools.partial(predict_by, engine, self._family, batch)
        tokens = self._family.tokens(engine.model, batch.latents.shape)
        mask = loss_mask(self._family, batch)
        return float(objectives.loss(self._objective, predict, batch.latents, batch.seeds, dtype, tokens, t, mask))

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        """This process's micro-batches on the device, and how many samples of each count.

        All processes get the same number, because processes of a sharded model run forward together. A process without
        samples gets one that does not count.
        """
        engine = self._engine
        world = self._peers.world.of_samples(engine.strategy.cp)
        buckets, micro = list(self._store.buckets), engine.strategy.micro_batch_size
        reader = BatchReader(self._store, micro, 0.0, pinned=False)
        for held in self._held.chosen:
            for first in range(0, len(held.rows), micro * world.world_size):
                start = first + world.rank * micro
                count = min(micro, max(len(held.rows) - start, 0))
                mine = slice(start, start + count) if count else slice(1)
                batch = reader.read(buckets[held.bucket], held.parts[mine], held.rows[mine], held.seeds[mine])
                yield batch.to(engine.device, compute_dtype(engine.strategy)), count


MOST = 4
"""The most samples that a message names; it counts the others."""


class Samples:
    """Names the samples of a stream's steps."""

    def __init__(self, store: FeatureStore | RawStore, stream: FeatureStream) -> None:
        self._store = store
        self._stream = stream

    def of_step(self, step: int) -> str:
        """The end of a message: the samples of all processes in step number `step` (from 1)."""
        batch = self._stream.order.batch(step - 1)
        bucket = list(self._store.buckets)[batch.bucket]
        places = list(zip(batch.parts.tolist(), batch.rows.tolist(), strict=True))
        names = [self._store.name_of(bucket, *place) for place in places[:MOST]]
        return f"its samples are {listed(names, len(places))}"

    def not_finite(self, step: int, micro_batches: Sequence[Batch | CaptionedBatch]) -> list[str]:
        """The names of samples with a value that is not finite, in this process's micro-batches of that step."""
        return [
            self._store.name_of(bucket, int(parts[place]), int(rows[place]))
            for batch, (bucket, parts, rows, _) in zip(micro_batches, self._stream.samples(step - 1), strict=True)
            for place in _not_finite(batch)
        ]


def listed(names: Sequence[str], count: int) -> str:
    """The first few of `count` names."""
    first = ", ".join(names[:MOST])
    return first if count <= MOST else f"{first} and {count - MOST} more"


def _not_finite(batch: Batch | CaptionedBatch) -> list[int]:
    sound = torch.ones(len(batch.seeds), dtype=torch.bool)
    for tensor in batch.tensors():
        sound &= tensor.isfinite().reshape(len(batch.seeds), -1).all(1)
    return sound.logical_not().nonzero().flatten().tolist()
