"""What is seen of each step of a stage: its row, the loss of what is held out, pictures, and whether it was taken."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bigdit.loader.stream import FeatureStream, Micro
from bigdit.store import FeatureStore
from bigdit.train.feed import Feed
from bigdit.train.going_on import Start
from bigdit.train.seen.metrics import Metrics
from bigdit.train.seen.mfu import mfu_of
from bigdit.train.seen.pictures import Pictures
from bigdit.train.seen.samples import Samples
from bigdit.train.seen.skipped import SkippedSteps
from bigdit.train.seen.trackers import Trackers
from bigdit.train.seen.validation import Validation
from bigdit.train.step import StepResult
from bigdit.train.stepped import Stepped


@dataclass(frozen=True)
class Watching:
    """All processes add each step alike."""

    metrics: Metrics
    skipped: SkippedSteps
    validation: Validation | None
    pictures: Pictures | None

    def add(self, step: int, lr: float, result: StepResult, micro_batches: Sequence[Micro]) -> None:
        """The result on these micro-batches of the step with which `step` are finished. Raises UserError where it ends
        the run."""
        measured: dict[str, Any] = {}
        if self.validation is not None and self.validation.due(step):
            with self.metrics.aside():
                measured = self.validation.measure()
        self.metrics.add(step, lr, result, micro_batches, measured)
        if self.pictures is not None and self.pictures.due(step):
            with self.metrics.aside():
                self.pictures.draw(step)
        self.skipped.add(step, lr, result, micro_batches)


def watch(start: Start, feed: Feed, stream: FeatureStream, stepped: Stepped, stack: ExitStack) -> Watching:
    """What is seen of the steps of a stream; `stack` ends it. Raises UserError where captions of pictures cannot be
    encoded."""
    stage, spec, store = start.reached.stage, start.reached.spec, feed.store
    run, peers, planned, device = stage.run, stepped.peers, stepped.planned, stepped.engine.device
    samples, is_main = Samples(store, stream), peers.world.is_main
    settings = run.model_dump(mode="json")
    trackers = stack.enter_context(Trackers(run.trackers, run.output, start.step, settings, shown=is_main))
    emulated = stepped.meter.emulated
    metrics = stack.enter_context(
        Metrics(
            run.output,
            peers,
            device,
            start=start.step,
            stop=stage.end,
            images=stepped.strategy.global_batch_size,
            name_samples=samples.of_step,
            memory=stepped.meter.now,
            written=start.found.state["metrics"] if start.found else None,
            planned_bytes=None if planned is None else planned.peak_allocated_bytes,
            stage=stage.number if stage.count > 1 else None,
            mfu=mfu_of(spec, stepped.family, stepped.strategy, device, emulated=emulated) if is_main else None,
            trackers=trackers,
        )
    )
    model = peers, stepped.engine, stepped.ema, stepped.family, stepped.objective, stage.end
    validation = pictures = None
    if run.validation is not None and feed.order.held is not None and isinstance(store, FeatureStore):
        validation = Validation(run.validation, store, feed.order.held, *model)
    if run.samples is not None:
        known = store.schema.classes
        pictures = stack.enter_context(Pictures(run.samples, run, spec, known, *model, trackers.show))
    skipped = SkippedSteps(stepped.engine, peers, samples, run.train.most_skipped_steps)
    return Watching(metrics, skipped, validation, pictures)
