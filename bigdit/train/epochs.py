"""A run's length by epochs: the steps that they come to, which are known when its samples can be counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from bigdit.config import RunConfig, check
from bigdit.config.stages import in_order, of_each
from bigdit.errors import UserError
from bigdit.sources.open import open_source
from bigdit.store import FeatureStore
from bigdit.train.prepare import Prepared, check_stores
from bigdit.units import how_many


def counted(stages: Sequence[Prepared], *, needed: bool = True) -> tuple[list[Prepared], list[str]]:
    """Each stage with its train.steps, also where it says train.epochs; and what these come to, a line each.

    Not `needed`, a stage whose features are not there stays as it is, and a line says so. Raises UserError where a
    store cannot be read, or the steps that were found do not go with what else is said of the schedule.
    """
    lines: list[str] = []

    def one(number: int) -> Prepared:
        found, line = _counted(stages[number], needed)
        lines.extend(line)
        return found

    found = of_each(range(len(stages)), one)
    placed = in_order([each.stage for each in found])
    return [replace(each, stage=stage) for each, stage in zip(found, placed, strict=True)], lines


def _counted(prepared: Prepared, needed: bool) -> tuple[Prepared, list[str]]:
    stage, run = prepared.stage, prepared.stage.run
    epochs = run.train.epochs
    if epochs is None:
        return prepared, []
    said = f"{stage.prefix}train.epochs {epochs:g}"
    try:
        check_stores([stage])
    except UserError:
        if needed:
            raise
        return prepared, [f"{said}: how many steps they come to is known when {run.data.features} holds features"]
    samples, batch = samples_of(run), prepared.strategy.global_batch_size
    steps = steps_of(epochs, samples, batch)
    train = run.train.model_copy(update={"steps": steps, "epochs": None})
    run = run.model_copy(update={"train": train})
    check(run, prepared.spec)
    line = f"{said} of {how_many(samples, 'sample')} in steps of {batch:,}: {how_many(steps, 'step')}"
    return replace(prepared, stage=replace(stage, run=run, length="train.epochs")), [line]


def samples_of(run: RunConfig) -> int:
    """The samples of the run's store that are trained on, or of its sources. Raises UserError where they cannot be
    read."""
    if run.data.features is None:
        return len(open_source(run.data))
    store = FeatureStore.open(run.data.store, run.data.reader, run.data.remote_cache)
    held_out = run.validation.samples if run.validation else 0
    return max(int(store.index.counts.sum()) - held_out, 1)  # the loader refuses to hold out all


def steps_of(epochs: float, samples: int, global_batch_size: int) -> int:
    """Steps in which so many samples come `epochs` times, the last one full too."""
    return math.ceil(Fraction(str(epochs)) * samples / global_batch_size)  # as it was written, not as a float has it
