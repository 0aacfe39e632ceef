"""Where a run starts or resumes, and how many steps its epochs are. The checkpoint is checked before loading."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from bigdit import checkpoint
from bigdit.catalog.families import objective_of
from bigdit.catalog.models import repositories
from bigdit.checkpoint import Checkpoint
from bigdit.config.check import has_store, lacks_store, schedule_problems
from bigdit.config.plan_file import unplanned
from bigdit.config.run import RunConfig
from bigdit.config.stages import in_order, of_each
from bigdit.errors import UserError
from bigdit.loader.online import RawStore
from bigdit.loader.order import Order
from bigdit.loader.stages import check_border, plan_order
from bigdit.sources.open import open_source
from bigdit.store import FeatureStore
from bigdit.store.files import url_of
from bigdit.strategy import Strategy
from bigdit.train.prepare import Prepared, stage_at
from bigdit.units import gib, how_many


def with_steps(stages: Sequence[Prepared]) -> tuple[list[Prepared], list[str]]:
    """Each stage with train.steps computed from train.epochs, and a line for each such stage.

    A stage without a store yet stays as it is, with a line. Raises UserError if a store cannot be read, or the steps do
    not fit the schedule.
    """

    found = of_each(stages, _with_steps)
    return list(in_order([stage for stage, _ in found])), [line for _, line in found if line is not None]


def _with_steps(stage: Prepared) -> tuple[Prepared, str | None]:
    run, epochs = stage.run, stage.run.train.epochs
    if epochs is None:
        return stage, None
    asked = f"{stage.prefix}train.epochs {epochs:g}"
    if lacks_store(run.data):
        return stage, f"{asked}: the number of steps is known once {run.data.features} holds features"
    samples, batch = epoch_of(run), stage.strategy.global_batch_size
    steps = steps_of(epochs, samples, batch)
    train = run.train.model_copy(update={"steps": steps, "epochs": None})
    if problems := schedule_problems(train, stage.strategy.optimizer):
        raise UserError(*problems)
    run = run.model_copy(update={"train": train})
    line = f"{asked} of {how_many(round(samples), 'sample')} in steps of {batch:,}: {how_many(steps, 'step')}"
    return replace(stage, run=run, length="train.epochs"), line


def samples_of(run: RunConfig) -> int:
    """The number of training samples in the run's store or sources. Raises UserError if they cannot be read."""
    if run.data.features is None:
        return len(open_source(run.data))
    store = FeatureStore.open(run.data.store, run.data.reader, run.data.remote_cache)
    validated = run.validation.samples if run.validation else 0
    return max(int(store.counts.sum()) - validated, 1)  # the loader reports a validation split of all samples


def epoch_of(run: RunConfig) -> Fraction:
    """The mean training samples of an epoch, with repeats and weights of sources. Raises as samples_of."""
    rates = [source.rate for source in run.data.images]
    if len(set(rates)) == 1:
        return rates[0] * samples_of(run)
    if run.data.features is None:
        sources = zip(rates, open_source(run.data).sources, strict=True)
        return sum((rate * len(source) for rate, source in sources), Fraction(0))
    store = FeatureStore.open(run.data.store, run.data.reader, run.data.remote_cache)
    order, _ = plan_order(
        store, 1, 0, None, 0, run.output, run.validation.samples if run.validation else 0, rates=rates
    )
    return sum(order.samples_of_epoch, Fraction(0))


def steps_of(epochs: float, samples: Fraction | int, global_batch_size: int) -> int:
    """The steps of `epochs` passes over the samples; the last step is full too."""
    return math.ceil(Fraction(str(epochs)) * samples / global_batch_size)  # exact, which the float is not


@dataclass(frozen=True)
class Start:
    """Where training begins: at the checkpoint `found`, None for a new run, in `stage`, one of `stages`.

    `notices`: lines to log about it.
    """

    stages: Sequence[Prepared]
    found: Checkpoint | None
    stage: Prepared
    notices: tuple[str, ...]

    @property
    def step(self) -> int:
        """Finished steps."""
        return 0 if self.found is None else self.found.step

    @property
    def ends(self) -> list[int]:
        """Finished steps at the end of each stage."""
        return [each.end for each in self.stages]

    @property
    def done(self) -> str | None:
        """A message if no steps are left."""
        if self.found is None or self.step < self.stage.end:
            return None
        key = f"{self.stage.prefix}{self.stage.length}"
        return f"{self.found.folder} has its {self.step} steps already; raise {key} to continue"

    def order(self, store: FeatureStore | RawStore) -> tuple[Order, list[str]]:
        """`plan_order` for the store of the current stage. Raises UserError as it does."""
        run, first_step = self.stage.run, self.stage.start
        saved, where = (None, run.output) if self.found is None else (self.found.state["data"], self.found.folder)
        validated = run.validation.samples if run.validation else 0
        batch = self.stage.strategy.global_batch_size
        rates = [source.rate for source in run.data.images]
        return plan_order(store, batch, run.train.seed, saved, self.step, where, validated, first_step, rates)


def start_notices(stages: Sequence[Prepared]) -> list[str]:
    """The lines that training would log about its start; none while its steps are unknown. Writes nothing.

    Raises UserError as training would, except for what encoders find in images with features online.
    """
    if any(each.run.train.steps is None for each in stages):
        return []
    start = start_of(stages)
    if start.done is not None:
        return [*start.notices, start.done]
    if start.found is not None:
        checkpoint.verify(start.found, by_content=False)
    run = start.stage.run
    if not has_store(run.data):
        return list(start.notices)
    _, notices = start.order(FeatureStore.open(run.data.store, run.data.reader, run.data.remote_cache))
    return [*start.notices, *(f"note: {line}" for line in notices)]


def _random_weights(first: Prepared) -> list[str]:
    """A line if a published model starts from random weights."""
    known = repositories(first.spec.name)
    if first.run.model.init_from is not None or not known:
        return []
    return [
        f"note: {first.spec.name} starts from random weights; model.init_from: FOLDER starts from published ones, such "
        f"as those of {known[0]}"
    ]


LOW_RATE = 0.1
"""Learning rates of Prodigy below this were meant for another optimizer."""


def _low_rate(strategy: Strategy) -> list[str]:
    """A line if Prodigy has the learning rate of another optimizer."""
    name, lr = strategy.optimizer.name, strategy.optimizer.lr
    if name != "prodigy" or lr >= LOW_RATE:
        return []
    return [
        f"note: strategy.optimizer.lr is {lr:g}, and prodigy multiplies it by its own estimate of the rate: 1 is "
        "usual, and strategy.optimizer.d_coef adjusts it"
    ]


def verdict(stages: Sequence[Prepared]) -> str:
    """A checked run as `ok: 240 images, 3 buckets, 60 steps of 4, fits as planned: 21.34 GiB of 23.53 GiB`."""
    lines = [(f"{each.name}: " if each.count > 1 else "") + ", ".join(_known(each)) for each in stages]
    return "; ".join([f"ok: {lines[0]}", *lines[1:], *_progress(stages)])


def _progress(stages: Sequence[Prepared]) -> list[str]:
    """Where a run with a checkpoint resumes, if its steps are known."""
    start = start_of(stages) if all(each.run.train.steps is not None for each in stages) else None
    if start is None or not start.step:
        return []
    return ["nothing is left to train" if start.done else f"resumes after step {start.step:,}"]


def _known(stage: Prepared) -> Iterator[str]:
    run, plan, batch = stage.run, stage.plan, stage.strategy.global_batch_size
    data, train = run.data, run.train
    if data.features is None or has_store(data):
        yield how_many(samples_of(run), data.samples.removesuffix("s"))
    else:
        yield f"features in {data.features}" if url_of(data.features) else "no features yet (`bigdit extract`)"
    yield how_many(len(data.all_buckets), "bucket")
    yield f"{train.steps:,} steps of {batch:,}" if train.steps else f"{train.epochs:g} epochs in steps of {batch:,}"
    if plan is None or unplanned(stage.strategy, plan):
        yield "memory not planned (`bigdit plan --config`)"
    else:
        taken, usable = plan.expected.process_bytes[1], plan.expected.usable_bytes
        yield f"{plan.expected.verdict.lower()} as planned: {gib(taken)} of {gib(usable)}"


def start_of(stages: Sequence[Prepared]) -> Start:
    """Where training begins. Raises UserError if it cannot resume from the output's checkpoint."""
    found, notices = checkpoint.latest(stages[0].run.output)
    if found is None:
        return Start(stages, None, stages[0], (*notices, *_random_weights(stages[0]), *_low_rate(stages[0].strategy)))
    stage, last = stage_at(stages, found.step), stage_at(stages, max(found.step - 1, 0))
    check_border(found.state["data"], found.folder, last.start, found.step)
    checkpoint.check_resumable(found, stage.spec, stage.strategy)
    objective = objective_of(stage.spec, stage.run.objective)
    checkpoint.check_objective(found, objective)
    start = Start(stages, found, stage, tuple(notices))
    if last is not stage or start.done is not None:  # a new stage may differ, and without steps nothing is trained
        return start
    run = stage.run.model_copy(update={"objective": objective})
    changed = [f"note: {line}" for line in checkpoint.changed_since(found, run)]
    return replace(start, notices=(*notices, *changed))
