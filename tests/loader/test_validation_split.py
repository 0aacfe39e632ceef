"""Validation samples are never trained on, do not depend on other samples, and cannot be changed during a run."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from stores import make_store

from bigdit.errors import UserError
from bigdit.loader.order import EpochStage, Order, ValidationSplit
from bigdit.loader.stages import data_state, plan_order
from bigdit.store import FeatureStore
from bigdit.store.store import Index

SHAPES = ((4, 4, 4), (4, 4, 6), (4, 6, 4), (4, 8, 8))
PART = 8


def tables(buckets):
    return st.lists(st.lists(st.integers(0, 5), min_size=buckets, max_size=buckets), min_size=1, max_size=12)


pairs = st.integers(1, 4).flatmap(lambda buckets: st.tuples(tables(buckets), tables(buckets)))
"""Samples by part and bucket: the existing ones, and later ones of as many buckets."""


def index_of(table, shapes=SHAPES):
    starts = PART * np.arange(len(table))
    parts = np.stack([starts, starts + PART, np.ones_like(starts)], axis=1)
    return Index(shapes[: len(table[0])], parts, np.array(table, np.int64))


def chosen(held, shapes=SHAPES):
    """(shape, part, row) of each sample, and its seed."""
    return {
        (shapes[each.bucket], part, row): seed
        for each in held.chosen
        for part, row, seed in zip(each.parts.tolist(), each.rows.tolist(), each.seeds, strict=True)
    }


@given(pairs, st.integers(1, 9), st.data())
@settings(max_examples=40)
def test_what_is_held_out_never_comes_and_all_else_does(pair, batch, data):
    table, more = pair
    assume(np.sum(table) > 1)
    index = index_of([*table, *more])
    held = ValidationSplit(index, len(table), data.draw(st.integers(1, int(np.sum(table)) - 1)))
    stages = (EpochStage(0, len(table)), EpochStage(2, len(index.parts)))
    order = Order(index.counts, index.shapes, batch, 0, stages=stages, window_parts=3, validation=held)
    seen = set()
    for step in range(order.batches_before(2) + 2 * int(index.counts.sum())):
        found = order.batch(step)
        seen |= {
            (SHAPES[found.bucket], *place) for place in zip(found.parts.tolist(), found.rows.tolist(), strict=True)
        }
    everything = {
        (shape, part, row)
        for part, counts in enumerate(index.counts.tolist())
        for shape, count in zip(index.shapes, counts, strict=True)
        for row in range(count)
    }
    assert seen == everything - chosen(held).keys()


@given(pairs, st.integers(1, 20))
def test_parts_and_buckets_that_come_later_change_nothing(pair, samples):
    table, more = pair
    held = chosen(ValidationSplit(index_of(table), len(table), samples))
    assert len(held) == min(samples, np.sum(table))
    assert chosen(ValidationSplit(index_of([*table, *more]), len(table), samples)) == held
    other = ((1, 1, 1), *SHAPES)  # a bucket that comes before the others
    wider = [[0, *each] for each in table]
    assert chosen(ValidationSplit(index_of(wider, other), len(table), samples), other) == held
    assert chosen(ValidationSplit(index_of(table), len(table), samples + 3)).items() >= held.items()


def test_large_stores_are_gone_through_a_piece_at_a_time(monkeypatch):
    index = index_of(np.full((50, 2), 4))
    whole = chosen(ValidationSplit(index, 50, 40))
    monkeypatch.setattr("bigdit.loader.order._PARTS_AT_ONCE", 7)
    assert chosen(ValidationSplit(index, 50, 40)) == whole
    shares = [sum(shape == each for shape, _, _ in whole) for each in SHAPES[:2]]
    assert min(shares) > 10  # two buckets with as many samples
    assert len({part for _, part, _ in whole}) > 20


def test_a_run_continues_with_what_it_held_out_alone(tmp_path):
    make_store(tmp_path / "store")
    store = FeatureStore.open(tmp_path / "store")
    order, _ = plan_order(store, 4, 0, None, 0, tmp_path, 6)
    saved = data_state(store, order, 0).model_dump(mode="json")
    assert saved["validated"] == 6
    make_store(tmp_path / "store", count=64)
    grown = FeatureStore.open(tmp_path / "store")
    again, _ = plan_order(grown, 4, 0, saved, 5, tmp_path, 6)
    assert chosen(again.validation, store.index.shapes) == chosen(order.validation, store.index.shapes)
    with pytest.raises(UserError) as refused:
        plan_order(grown, 4, 0, saved, 5, tmp_path, 7)
    assert str(refused.value) == (
        f"validation.samples is 7, and {tmp_path} was trained with 6: its weights would be validated on "
        "samples that they were trained on; set it to 6, or choose another output"
    )
    assert plan_order(store, 4, 0, saved | {"validated": 0}, 5, tmp_path)[0].validation is None  # of an earlier version


def test_something_must_be_left_to_train_on(tmp_path):
    make_store(tmp_path / "store")
    store = FeatureStore.open(tmp_path / "store")
    with pytest.raises(UserError) as refused:
        plan_order(store, 4, 0, None, 0, tmp_path, 40)
    assert str(refused.value) == (
        f"validation.samples is 40, and {store.root} has 40 samples: none would be left to train on; set fewer, "
        "such as 4, or add images"
    )
    _, notices = plan_order(store, 12, 0, None, 0, tmp_path, 26)
    assert any("fewer than a global batch of 12" in line for line in notices)
