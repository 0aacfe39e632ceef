"""Stores from which samples were removed: what a run trains on and validates with, before and after."""

from pathlib import Path

import pytest
from stores import make_store

from bigdit.errors import UserError
from bigdit.loader.stages import data_state, plan_order
from bigdit.store import FeatureStore

GONE = ((1, 4, 41), (16, 18, -1))
"""40 samples. 1 to 3 were replaced by 41 to 43, and 16 and 17 removed. 40, 44 and 45 are new."""
AWAY = {1, 2, 3, 16, 17}


def trained(store, order, steps):
    """The samples of each of these steps, by their indices in the store."""
    found = []
    for step in steps:
        batch = order.batch(step)
        places = zip(batch.parts.tolist(), batch.rows.tolist(), strict=True)
        shape = store.index.shapes[batch.bucket]
        found.append([int(store.part(part).rows[shape][row, 0]) for part, row in places])
    return found


def held(store, order):
    places = zip(*(column.tolist() for column in order.validation.rows), strict=True)
    return {int(store.part(part).rows[store.index.shapes[bucket]][row, 0]) for bucket, part, row in places}


def epoch(store, order, number):
    steps = range(order.batches_before(number), order.batches_before(number + 1))
    return sorted(index for batch in trained(store, order, steps) for index in batch)


def test_a_fresh_run_has_no_sample_that_is_gone(tmp_path):
    make_store(tmp_path, 46, gone=GONE)
    store = FeatureStore.open(tmp_path)
    live = sorted({*range(46)} - AWAY)
    assert int(store.counts.sum()) == len(live)
    order, notices = plan_order(store, 1, 0, None, 0, tmp_path)
    assert (epoch(store, order, 0), notices) == (live, [])
    assert epoch(store, order, 1) == live
    remote = FeatureStore.open(Path(f"file:{tmp_path}"))
    assert trained(remote, plan_order(remote, 1, 0, None, 0, tmp_path)[0], range(9)) == trained(store, order, range(9))
    order, _ = plan_order(store, 1, 0, None, 0, tmp_path, validated=9)
    kept = held(store, order)
    assert len(kept) == 9
    assert epoch(store, order, 0) == sorted({*live} - kept)
    with pytest.raises(UserError, match=r"validation.samples is 41, and .* has 41 samples: none would be left"):
        plan_order(store, 1, 0, None, 0, tmp_path, validated=41)


@pytest.mark.parametrize("validated", [0, 9])
def test_a_run_meets_changes_with_its_next_epoch_and_what_replaced_validation_samples_never(tmp_path, validated):
    make_store(tmp_path, 40)
    store = FeatureStore.open(tmp_path)
    order, _ = plan_order(store, 2, 0, None, 0, tmp_path, validated=validated)
    saved = data_state(store, order, 0).model_dump(mode="json")
    out, before = held(store, order) if validated else set(), trained(store, order, range(order.batches_before(1)))

    make_store(tmp_path, 46, gone=GONE)
    store = FeatureStore.open(tmp_path)
    again, notices = plan_order(store, 2, 0, saved, 4, tmp_path, validated=validated)
    enter = "changes enter with epoch 1; the order until then does not change"
    assert notices[0] == f"{tmp_path} got 6 samples and lost 5: {enter}"
    assert trained(store, again, range(len(before))) == before
    assert (held(store, again) if validated else set()) == out
    assert not validated or out > {1, 2, 16, 17}
    replaced = {40 + index for index in out & {1, 2, 3}}
    now = {*range(46)} - AWAY - out - replaced
    steps = range(again.batches_before(1), again.batches_before(4))
    assert {index for batch in trained(store, again, steps[1:]) for index in batch} == now

    saved = data_state(store, again, 0).model_dump(mode="json")
    order, notices = plan_order(store, 2, 0, saved, 30, tmp_path, validated=validated)
    assert (notices, trained(store, order, steps)) == ([], trained(store, again, steps))
    for gone in (GONE[:1], ()):
        make_store(tmp_path, 46, gone=gone)
        with pytest.raises(UserError, match=r"does not begin with the 6 parts that .* was trained on"):
            plan_order(FeatureStore.open(tmp_path), 2, 0, saved, 30, tmp_path, validated=validated)


def test_samples_that_were_only_removed(tmp_path):
    make_store(tmp_path, gone=[(0, 38, -1)])
    store = FeatureStore.open(tmp_path)
    order, _ = plan_order(store, 1, 0, None, 0, tmp_path)
    assert epoch(store, order, 0) == [38, 39]
    _, notices = plan_order(store, 4, 0, None, 0, tmp_path)
    assert notices[0].startswith("data.features has 2 samples, fewer than a global batch of 4")
    make_store(tmp_path, gone=[(0, 40, -1)])
    with pytest.raises(UserError, match=r"all images of .* were removed from their sources; add images"):
        FeatureStore.open(tmp_path)
