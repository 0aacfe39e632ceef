"""The state of a run's data in a checkpoint: a few numbers, from which the order resumes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from bigdit.errors import UserError
from bigdit.loader.online import RawStore
from bigdit.loader.order import WINDOW_PARTS, EpochStage, Ints, LeftOut, Order, Rates, ValidationSplit
from bigdit.store import FeatureStore
from bigdit.store.part import shape_name
from bigdit.store.schema import Known
from bigdit.store.store import NO_ROWS, Rows
from bigdit.strategy import Strict
from bigdit.units import how_many


class DataState(Strict):
    """Everything that the order depends on.

    `stages`: (first epoch, parts) of each stage of the data. `changes`: how many changes of the store each stage
    follows. `parts_digest`: of the parts of the last stage. `classes`: their names or number; None for captions.
    `validated`: the number of validation samples. `first_step`: where the order's stage of the run begins. `sources`:
    the identities of online sources; None for a store. `rates`: how often an epoch has the samples of each source;
    empty if all are 1.
    """

    seed: NonNegativeInt
    global_batch_size: PositiveInt
    window_parts: PositiveInt
    stages: list[tuple[NonNegativeInt, PositiveInt]]
    changes: list[NonNegativeInt] = []
    parts_digest: str
    classes: Known | None = None
    validated: NonNegativeInt = 0
    first_step: NonNegativeInt = 0
    sources: list[dict[str, Any]] | None = None
    rates: list[tuple[PositiveInt, PositiveInt]] = []

    @property
    def epoch_stages(self) -> list[EpochStage]:
        """The stages. Which rows they leave out is not known here."""
        changes = self.changes or [0] * len(self.stages)
        return [EpochStage(*stage, after) for stage, after in zip(self.stages, changes, strict=False)]


def data_state(store: FeatureStore | RawStore, order: Order, seed: int) -> DataState:
    """The state of the order for a checkpoint."""
    return DataState(
        seed=seed,
        global_batch_size=order.global_batch_size,
        window_parts=WINDOW_PARTS,
        stages=[(stage.first_epoch, stage.parts) for stage in order.stages],
        changes=[stage.changes for stage in order.stages],
        parts_digest=_digest(store, order.stages[-1]),
        classes=store.schema.classes,
        validated=0 if order.validation is None else int(order.validation.counts.sum()),
        first_step=order.first_step,
        sources=store.schema.sources if isinstance(store, RawStore) else None,
        rates=[rate.as_integer_ratio() for rate in order.rates.of_sources],
    )


def check_border(saved: dict[str, Any] | None, where: Path, begins: int, step: int) -> None:
    """Raise UserError if the run's stage at `step` `begins` at another step than in the checkpoint `where`.

    Its order would differ.
    """
    began = begins if saved is None else _parse(saved, where).first_step
    if began == begins:
        return
    before, all_of_them = how_many(began, "step"), how_many(step, "step")
    fix = f"make earlier stages {before} long again" if began else f"let the first stage have all {all_of_them}"
    raise UserError(
        f"stages: {where} was saved in a stage that began at step {began}, and that stage begins at {begins} now; "
        f"{fix}, or choose another output"
    )


def plan_order(
    store: FeatureStore | RawStore,
    global_batch_size: int,
    seed: int,
    saved: dict[str, Any] | None,
    step: int,
    where: Path,
    validated: int = 0,
    first_step: int = 0,
    rates: Sequence[Fraction] = (),
) -> tuple[Order, list[str]]:
    """The order of a run over the store at `step`, resumed from the state `saved` in the checkpoint `where`; and notes.

    New parts of the store enter with the next epoch. `validated` samples of the first parts are for validation. A stage
    of the run that begins at `first_step` has its own order. A checkpoint of an earlier stage does not have it;
    `check_border` checks where it begins. `rates`: of the sources. Raises UserError if store, seed, global batch size,
    rates or validation samples differ from the checkpoint's.
    """
    rated = rates_of(store, rates)
    state = None if saved is None else _parse(saved, where)
    problems = [] if state is None else _other_classes(store, state, where)
    if state is not None and step != first_step:
        problems += _other_order(store, state, where, global_batch_size, seed, validated)
        problems += _other_rates(store, state, where, rated)
    if problems:
        raise UserError(*problems)
    if state is not None and step != first_step:
        return _resumed(store, state, where, step, first_step, rated)
    index, now = store.index, EpochStage(0, len(store.index.parts), len(store.schema.changes))
    validation = _validation_split(store, now, validated)
    order = Order(
        index.counts,
        index.shapes,
        global_batch_size,
        seed,
        stages=[_with_left_out(store, validation, now)],
        validation=validation,
        first_step=first_step,
        rates=rated,
    )
    return order, _scarce(order, store)


def rates_of(store: FeatureStore | RawStore, rates: Sequence[Fraction]) -> Rates:
    """The rates of a store's parts. Raises UserError if `rates` has fewer sources than the store."""
    if all(rate == 1 for rate in rates):
        return Rates((), np.zeros(len(store.index.parts), np.int64))
    sources = max(store.schema.owners) + 1
    if len(rates) < sources:
        raise UserError(
            f"data.images has {how_many(len(rates), 'source')} with repeats or weight, and {store.root} has "
            f"{sources}; list the sources that it was extracted from"
        )
    return Rates(rates, source_of_part(store))


def source_of_part(store: FeatureStore | RawStore) -> Ints:
    """For each part of a store, the number of the run's source that it belongs to."""
    entries = np.searchsorted(store.schema.ends(), store.index.parts[:, 0], "right")
    return np.array(store.schema.owners, np.int64)[entries]


def _other_rates(store: FeatureStore | RawStore, state: DataState, where: Path, rates: Rates) -> list[str]:
    """Problems: sources of the checkpoint whose rate is another one now."""
    last = store.index.parts[min(state.stages[-1][1], len(store.index.parts)) - 1, 0]
    sources = max(store.schema.owners[: int(np.searchsorted(store.schema.ends(), last, "right")) + 1]) + 1
    then, now = [Fraction(*each) for each in state.rates], rates.of_sources
    pairs = list(itertools.zip_longest(then[:sources], now[:sources], fillvalue=Fraction(1)))
    return [
        f"data.images[{number}]: repeats × weight is {float(asked):g}, and {where} was trained with {float(found):g}: "
        "samples would repeat or be skipped; set it as it was, or choose another output"
        for number, (found, asked) in enumerate(pairs)
        if found != asked
    ]


def _resumed(
    store: FeatureStore | RawStore, state: DataState, where: Path, step: int, first_step: int, rates: Rates
) -> tuple[Order, list[str]]:
    """The order of the checkpoint, with new parts of the store; and notes."""
    index, stages = store.index, state.epoch_stages
    validation, last = _validation_split(store, stages[0], state.validated), stages[-1]

    def ordered(stages: Sequence[EpochStage]) -> Order:
        return Order(
            index.counts,
            index.shapes,
            state.global_batch_size,
            state.seed,
            stages=[_with_left_out(store, validation, stage) for stage in stages],
            window_parts=state.window_parts,
            validation=validation,
            first_step=first_step,
            rates=rates,
        )

    order, changed = ordered(stages), _changed(store, state, where)
    epoch = order.epoch_of(step)
    first = epoch if step == order.batches_before(epoch) else epoch + 1
    now = EpochStage(first, len(index.parts), len(store.schema.changes))
    if (last.parts, last.changes) == (now.parts, now.changes):
        return order, changed
    order = ordered([*(stage for stage in stages if stage.first_epoch < first), now])
    return order, [*changed, _grown(store, last, now), *_scarce(order, store)]


def _grown(store: FeatureStore | RawStore, last: EpochStage, now: EpochStage) -> str:
    """A note on what is new in a store since the stage `last`."""
    parts, samples = now.parts - last.parts, int(store.counts[last.parts :].sum())
    found = f"{store.root} has {how_many(parts, 'part')} more ({how_many(samples, 'sample')}) than before: new samples"
    if isinstance(store, FeatureStore) and now.changes != last.changes:
        gone = len(store.gone(now.changes).rows) - len(store.gone(last.changes).rows)
        found = f"{store.root} got {how_many(samples, 'sample')} and lost {gone:,}: changes"
    return f"{found} enter with epoch {now.first_epoch}; the order until then does not change"


def _other_order(
    store: FeatureStore | RawStore, state: DataState, where: Path, global_batch_size: int, seed: int, validated: int
) -> list[str]:
    """Problems: settings that differ from the checkpoint's, so that samples would repeat or be skipped."""
    problems = [
        f"{key} is {asked}, and {where} was trained with {found}: samples would repeat or be skipped; set it to {found}"
        for key, found, asked in (
            ("train.seed", state.seed, seed),
            ("the global batch (strategy.global_batch_size)", state.global_batch_size, global_batch_size),
        )
        if found != asked
    ]
    problems += _other_parts(store, state.epoch_stages[-1], state, where)
    if validated != state.validated:
        problems.append(
            f"validation.samples is {validated}, and {where} was trained with {state.validated}: its weights would be "
            f"validated on samples that they were trained on; set it to {state.validated}, or choose another output"
        )
    return problems


def _other_classes(store: FeatureStore | RawStore, state: DataState, where: Path) -> list[str]:
    if state.classes == store.schema.classes:
        return []
    key = store.root if isinstance(store, RawStore) else f"data.features: {store.root}"
    return [f"{key} has other classes than {where}, or in another order; restore them, or choose another output"]


def _other_parts(store: FeatureStore | RawStore, stage: EpochStage, state: DataState, where: Path) -> list[str]:
    exist = stage.parts <= len(store.index.parts) and stage.changes <= len(store.schema.changes)
    same = exist and _digest(store, stage) == state.parts_digest
    if not isinstance(store, RawStore):
        known = how_many(stage.parts, "part")
        problem = f"data.features: {store.root} does not begin with the {known} that {where} was trained on"
        return [] if same else [f"{problem}; restore them, or choose another output"]
    before = [source["count"] for source in state.sources or ()]
    now = [source["count"] for source in store.schema.sources[: len(before)]]
    if same and now == before:
        return []
    counted = f": {_listed(now)} now, and {_listed(before)} then" if before else ""
    return [
        f"{store.root} has other images than {where} was trained on{counted}; restore them, put new ones into a "
        "source at the end of the list, or choose another output"
    ]


def _listed(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts))


def _changed(store: FeatureStore | RawStore, state: DataState, where: Path) -> list[str]:
    """A note on sources that changed but have as many images as before."""
    if not isinstance(store, RawStore) or state.sources is None:
        return []
    changed = sum(one != other for one, other in zip(store.schema.sources, state.sources, strict=False))
    if not changed:
        return []
    return [
        f"{changed} of {how_many(len(state.sources), 'source')} of {store.root} changed since {where}: names, sizes or "
        "captions of images. Replaced images are trained on from here; images that moved in the order may repeat or be "
        "skipped in this epoch"
    ]


def _validation_split(store: FeatureStore | RawStore, first: EpochStage, samples: int) -> ValidationSplit | None:
    """The validation samples of a run's first stage, if any. Raises UserError if no sample is left to train on."""
    if not samples:
        return None
    if problems := none_left(store, samples, first):
        raise UserError(*problems)
    return ValidationSplit(store.index, first.parts, samples, _gone(store, first))


def _gone(store: FeatureStore | RawStore, stage: EpochStage) -> Rows:
    return store.gone(stage.changes) if isinstance(store, FeatureStore) and stage.changes else NO_ROWS


def _with_left_out(store: FeatureStore | RawStore, validation: ValidationSplit | None, stage: EpochStage) -> EpochStage:
    """The stage without gone rows, and without validation samples and their replacements."""
    if not isinstance(store, FeatureStore) or not stage.changes:
        return stage
    rows = [_gone(store, stage)]
    if validation is not None:
        rows += [validation.rows, store.successors(validation.rows, stage.changes)]
    return replace(stage, left_out=LeftOut(store.index, Rows.joined(*rows)))


def none_left(store: FeatureStore | RawStore, samples: int, first: EpochStage | None = None) -> list[str]:
    """A message if `samples` for validation, of the stage `first` or of all, leave none to train on."""
    count = int(store.counts.sum())
    if first is not None:
        count = int(store.index.counts[: first.parts].sum()) - len(_gone(store, first).rows)
    if samples < count:
        return []
    return [
        f"validation.samples is {samples}, and {store.root} has {how_many(count, 'sample')}: none would be left to "
        f"train on; set fewer, such as {max(count // 10, 1)}, or add images"
    ]


def _scarce(order: Order, store: FeatureStore | RawStore) -> list[str]:
    """Notes on buckets that are empty, or smaller than a global batch."""
    batch, totals = order.global_batch_size, [float(total) for total in order.samples_of_epoch]
    filled = {shape_name(shape): total for shape, total in zip(store.index.shapes, totals, strict=True) if total}
    buckets, limit = len(store.schema.all_buckets), f"fewer than a global batch of {batch} (strategy.global_batch_size)"
    sizes = len({tuple(shape) for shape, total in zip(store.index.shapes, totals, strict=True) if total})
    empty = f"{buckets - sizes} of {buckets} data.buckets have no samples: all latents are "
    lines = [empty + ", ".join(filled)] if sizes < buckets else []
    if sum(totals) < batch:
        return [
            *lines,
            f"data.features has {_samples(sum(totals))}, {limit}: each step takes more than an epoch, and "
            "repeats samples; lower strategy.global_batch_size, or add images",
        ]
    return lines + [
        f"bucket {name} has {_samples(total)}, {limit}: each of its batches takes {batch / total:.1f} "
        "epochs of them, and repeats samples"
        for name, total in filled.items()
        if total < batch
    ]


def _samples(total: float) -> str:
    return how_many(int(total), "sample") if total == int(total) else f"{total:.1f} samples an epoch"


def _parse(saved: dict[str, Any], where: Path) -> DataState:
    try:
        return DataState.model_validate(saved)
    except ValidationError:
        raise UserError(f"{where} has a damaged state of its data; resume from an earlier checkpoint") from None


def _digest(store: FeatureStore | RawStore, stage: EpochStage) -> str:
    """A digest of the ranges and samples of a stage's parts. Later buckets do not change it."""
    parts = stage.parts
    digest = xxhash.xxh3_64(store.index.parts[:parts, :2].tobytes())
    for shape, column in zip(store.index.shapes, store.index.counts.T, strict=True):
        if column[:parts].any():
            digest.update(shape_name(shape).encode() + column[:parts].tobytes())
    if stage.changes:
        digest.update(str(store.schema.gone(stage.changes)).encode())
    return digest.hexdigest()
