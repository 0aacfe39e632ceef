"""What a run remembers of its data: a handful of numbers beside the step, from which the order goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from bigdit.errors import UserError
from bigdit.loader.order import WINDOW_PARTS, Order, Stage
from bigdit.loader.raw_store import RawStore
from bigdit.loader.validation import ValidationSplit
from bigdit.store import FeatureStore
from bigdit.store.part import shape_name
from bigdit.store.schema import Known
from bigdit.strategy import Strict
from bigdit.units import how_many


class DataState(Strict):
    """Stages of the data as (first epoch, parts); `parts_digest`: of the parts of the last; what else the order follows
    from; the `classes` that labels are of, by their names or their number, None of captions; how many samples of the
    first stage are `held_out`; the `first_step` of the order: that of the stage of the run that it is of; and of
    features online the `sources` of pictures, as they say what they are, None of a store, which keeps them itself."""

    seed: NonNegativeInt
    global_batch_size: PositiveInt
    window_parts: PositiveInt
    stages: list[tuple[NonNegativeInt, PositiveInt]]
    parts_digest: str
    classes: Known | None = None
    held_out: NonNegativeInt = 0
    first_step: NonNegativeInt = 0
    sources: list[dict[str, Any]] | None = None


def data_state(store: FeatureStore | RawStore, order: Order, seed: int) -> DataState:
    """What a checkpoint keeps of the order."""
    return DataState(
        seed=seed,
        global_batch_size=order.global_batch_size,
        window_parts=WINDOW_PARTS,
        stages=[(stage.first_epoch, stage.parts) for stage in order.stages],
        parts_digest=_digest(store, order.stages[-1].parts),
        classes=store.schema.classes,
        held_out=0 if order.held is None else int(order.held.counts.sum()),
        first_step=order.first_step,
        sources=store.schema.sources if isinstance(store, RawStore) else None,
    )


def check_border(saved: dict[str, Any] | None, where: Path, begins: int, step: int) -> None:
    """Raise UserError where the stage that took the last of `step` steps `begins` elsewhere now than when the
    checkpoint `where` was saved: its order would have been another one."""
    began = begins if saved is None else _parse(saved, where).first_step
    if began == begins:
        return
    before, all_of_them = how_many(began, "step"), how_many(step, "step")
    fix = f"let those before it come to {before} again" if began else f"let the first one take all {all_of_them}"
    raise UserError(
        f"stages: {where} was saved in one that begins at step {began}, and the one that took its last step begins at "
        f"{begins} now; {fix}, or choose another output"
    )


def plan_order(
    store: FeatureStore | RawStore,
    global_batch_size: int,
    seed: int,
    saved: dict[str, Any] | None,
    step: int,
    where: Path,
    held_out: int = 0,
    first_step: int = 0,
) -> tuple[Order, list[str]]:
    """The order of a run over the store that goes on at `step` from what the checkpoint `where` saved of it.

    Parts that the store has gained enter with the first epoch that has not begun; of those that it began with so many
    samples are `held_out`. A stage of the run that begins with `first_step` has an order of its own, of which a
    checkpoint of the stage before it knows nothing; whether it begins where it did, `check_border` says. The second
    value: what a person should know. Raises UserError where the store, the seed, the global batch or what is held out
    are not those of the checkpoint.
    """
    state = None if saved is None else _parse(saved, where)
    problems = [] if state is None else _other_classes(store, state, where)
    if state is not None and step != first_step:
        problems += _other_order(store, state, where, global_batch_size, seed, held_out)
    if problems:
        raise UserError(*problems)
    if state is not None and step != first_step:
        return _going_on(store, state, where, step, first_step)
    index = store.index
    held = _held_out(store, len(index.parts), held_out)
    order = Order(index.counts, index.shapes, global_batch_size, seed, held=held, first_step=first_step)
    return order, _scarce(order, store)


def _going_on(
    store: FeatureStore | RawStore, state: DataState, where: Path, step: int, first_step: int
) -> tuple[Order, list[str]]:
    """The order of the checkpoint, with what the store has gained since."""
    index, parts = store.index, state.stages[-1][1]
    stages = [Stage(*each) for each in state.stages]
    held = _held_out(store, stages[0].parts, state.held_out)

    def ordered(stages: Sequence[Stage]) -> Order:
        return Order(
            index.counts,
            index.shapes,
            state.global_batch_size,
            state.seed,
            stages=stages,
            window_parts=state.window_parts,
            held=held,
            first_step=first_step,
        )

    order, changed = ordered(stages), _changed(store, state, where)
    if parts == len(index.parts):
        return order, changed
    epoch = order.epoch_of(step)
    first = epoch if step == order.batches_before(epoch) else epoch + 1
    order = ordered([*(stage for stage in stages if stage.first_epoch < first), Stage(first, len(index.parts))])
    added = len(index.parts) - parts
    samples = int(index.counts[parts:].sum())
    return order, [
        *changed,
        f"{store.root} has {how_many(added, 'part')} more ({how_many(samples, 'sample')}) than before: what is new "
        f"enters with epoch {first}, and what was planned until then stays",
        *_scarce(order, store),
    ]


def _other_order(
    store: FeatureStore | RawStore, state: DataState, where: Path, global_batch_size: int, seed: int, held_out: int
) -> list[str]:
    """What is asked for now, and would have samples of the checkpoint's epoch come twice, or never."""
    problems = [
        f"{key} is {asked}, and {where} was trained with {found}: samples would come twice, or never; set it to {found}"
        for key, found, asked in (
            ("train.seed", state.seed, seed),
            ("the global batch (strategy.global_batch_size)", state.global_batch_size, global_batch_size),
        )
        if found != asked
    ]
    problems += _other_parts(store, state.stages[-1][1], state, where)
    if held_out != state.held_out:
        problems.append(
            f"validation.samples is {held_out}, and {where} was trained with {state.held_out} held out: its weights "
            f"would be validated on samples that they were trained on; set it to {state.held_out}, or choose another "
            "output"
        )
    return problems


def _other_classes(store: FeatureStore | RawStore, state: DataState, where: Path) -> list[str]:
    if state.classes == store.schema.classes:
        return []
    key = store.root if isinstance(store, RawStore) else f"data.features: {store.root}"
    return [
        f"{key} has other classes, or in another order, than {where} was trained on; bring them back, or choose "
        "another output"
    ]


def _other_parts(store: FeatureStore | RawStore, parts: int, state: DataState, where: Path) -> list[str]:
    same = parts <= len(store.index.parts) and _digest(store, parts) == state.parts_digest
    if not isinstance(store, RawStore):
        known = how_many(parts, "part")
        problem = f"data.features: {store.root} does not begin with the {known} that {where} was trained on"
        return [] if same else [f"{problem}; bring them back, or choose another output"]
    before = [source["count"] for source in state.sources or ()]
    now = [source["count"] for source in store.schema.sources[: len(before)]]
    if same and now == before:
        return []
    counted = f": {_listed(now)} now, and {_listed(before)} then" if before else ""
    return [
        f"{store.root} has other pictures than {where} was trained on{counted}; bring these back, have new ones in a "
        "further source at the end of the list, or choose another output"
    ]


def _listed(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts))


def _changed(store: FeatureStore | RawStore, state: DataState, where: Path) -> list[str]:
    """What a person should know of sources that have as many pictures as before, and are not as they were."""
    if not isinstance(store, RawStore) or state.sources is None:
        return []
    changed = sum(one != other for one, other in zip(store.schema.sources, state.sources, strict=False))
    if not changed:
        return []
    return [
        f"{changed} of {how_many(len(state.sources), 'source')} of {store.root} changed since {where}: names, sizes or "
        "captions of pictures; what was put in a picture's place is trained on from here, and what moved in their "
        "order comes twice, or not, in this epoch"
    ]


def _held_out(store: FeatureStore | RawStore, parts: int, samples: int) -> ValidationSplit | None:
    """So many samples of the first parts, where any are asked for. Raises UserError where none were left."""
    if problems := none_left(store, samples, parts):
        raise UserError(*problems)
    return ValidationSplit(store.index, parts, samples) if samples else None


def none_left(store: FeatureStore | RawStore, samples: int, parts: int | None = None) -> list[str]:
    """The line for so many samples that are held out of the first parts, or of all, where none is left to train on."""
    there = int(store.index.counts[:parts].sum())
    if samples < there:
        return []
    return [
        f"validation.samples is {samples}, and {store.root} has {how_many(there, 'sample')}: none would be left to "
        f"train on; hold out fewer, such as {max(there // 10, 1)}, or add pictures"
    ]


def _scarce(order: Order, store: FeatureStore | RawStore) -> list[str]:
    """What a person should know of buckets that are empty, or fill no global batch in an epoch."""
    counts, batch = store.index.counts, order.global_batch_size
    totals = (counts if order.held is None else counts - order.held.counts).sum(0).tolist()
    filled = {shape_name(shape): total for shape, total in zip(store.index.shapes, totals, strict=True) if total}
    asked, limit = len(set(store.schema.buckets)), f"fewer than a global batch of {batch} (strategy.global_batch_size)"
    empty = f"{asked - len(filled)} of {asked} data.buckets have no samples: all are of "
    lines = [empty + ", ".join(filled)] if len(filled) < asked else []
    if sum(totals) < batch:
        return [
            *lines,
            f"data.features has {how_many(sum(totals), 'sample')}, {limit}: each step takes more than an epoch, and "
            "has samples more than once; lower strategy.global_batch_size, or add pictures",
        ]
    return lines + [
        f"bucket {name} has {how_many(total, 'sample')}, {limit}: each of its batches takes {batch / total:.1f} "
        "epochs of them, and has samples more than once"
        for name, total in filled.items()
        if total < batch
    ]


def _parse(saved: dict[str, Any], where: Path) -> DataState:
    try:
        return DataState.model_validate(saved)
    except ValidationError:
        raise UserError(f"{where} has a damaged state of its data; resume from an earlier checkpoint") from None


def _digest(store: FeatureStore | RawStore, parts: int) -> str:
    """Of the ranges and the samples of the first `parts` parts; buckets that come later do not change it."""
    digest = xxhash.xxh3_64(store.index.parts[:parts, :2].tobytes())
    for shape, column in zip(store.index.shapes, store.index.counts.T, strict=True):
        if column[:parts].any():
            digest.update(shape_name(shape).encode() + column[:parts].tobytes())
    return digest.hexdigest()
