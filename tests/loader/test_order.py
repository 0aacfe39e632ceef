"""The order of samples: none lost, none twice, and the same for every split of the global batch."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bigdit.loader.order import EpochStage, Order, Rates, sample_seed

SHAPES = ((4, 4, 4), (4, 4, 6), (4, 6, 4), (4, 8, 8))


def tables(buckets):
    return st.lists(st.lists(st.integers(0, 5), min_size=buckets, max_size=buckets), min_size=1, max_size=12)


counts = st.integers(1, 4).flatmap(tables)
grown = st.integers(1, 4).flatmap(lambda buckets: st.tuples(tables(buckets), tables(buckets)))
"""What was there first, and what was added."""


def order_of(table, global_batch_size, seed=0, window_parts=3, **more):
    table = np.array(table, np.int64)
    return Order(table, SHAPES[: table.shape[1]], global_batch_size, seed, window_parts=window_parts, **more)


def samples(batch):
    return [(batch.bucket, part, row) for part, row in zip(batch.parts.tolist(), batch.rows.tolist(), strict=True)]


def walked(order, start, stop):
    return [samples(order.batch(step)) for step in range(start, stop)]


@given(counts, st.integers(1, 16), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_every_sample_comes_once_an_epoch(table, global_batch_size, seed):
    assume(np.sum(table))
    order = order_of(table, global_batch_size, seed)
    seen = Counter()
    for batch in walked(order, 0, 60):
        assert len(batch) == global_batch_size
        seen.update(batch)
    for bucket in range(len(table[0])):
        here = [(bucket, part, row) for part, each in enumerate(table) for row in range(each[bucket])]
        times = [seen.pop(sample, 0) for sample in here]
        assert not times or max(times) - min(times) <= 1
    assert not seen  # no sample that does not exist


RATES = st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 2), Fraction(7, 3), Fraction(3, 10)])


@given(counts, st.integers(1, 9), RATES, RATES, st.data())
@settings(max_examples=60, deadline=None)
def test_each_sample_comes_as_often_as_the_rate_of_its_source(table, global_batch_size, one, other, data):
    sources = np.array(sorted(data.draw(st.lists(st.integers(0, 1), min_size=len(table), max_size=len(table)))))
    assume(np.sum(table))
    rates = Rates([one, other], sources)
    order = order_of(table, global_batch_size, rates=rates)
    epochs = 20
    stop = order.batches_before(epochs)
    seen = Counter(sample for batch in walked(order, 0, stop) for sample in batch)
    for bucket in range(len(table[0])):
        missing = 0
        for part, each in enumerate(table):
            due = epochs * (one, other)[sources[part]]
            times = [seen.pop((bucket, part, row), 0) for row in range(each[bucket])]
            assert all(each < due + 1 for each in times)
            missing += sum(max(due - 1 - each, 0) for each in times)
        assert missing < global_batch_size  # the rest of the last epoch begins the next batch
    assert not seen
    assume(stop)
    step = data.draw(st.integers(0, stop - 1))
    fresh = order_of(table, global_batch_size, rates=rates)
    assert samples(fresh.batch(step)) == walked(order, step, step + 1)[0]
    assert order.batches_before(fresh.epoch_of(step)) <= step < order.batches_before(fresh.epoch_of(step) + 1)


def test_a_whole_rate_repeats_within_each_epoch_and_half_of_it_takes_turns():
    table = [[30, 12]] * 8
    sources = np.repeat([0, 1], 4)
    order = order_of(table, 6, rates=Rates([Fraction(3), Fraction(1, 2)], sources))
    steps = [(order.batches_before(at), order.batches_before(at + 1)) for at in range(4)]
    epochs = [Counter(sample for batch in walked(order, *span) for sample in batch) for span in steps]
    assert [sum(epoch.values()) for epoch in epochs] == [4 * 42 * 3 + 4 * 21] * 4
    for epoch in epochs:
        assert {times for (_, part, _), times in epoch.items() if part < 4} == {3}
        assert {times for (_, part, _), times in epoch.items() if part >= 4} == {1}
    first, second, third, _ = ({sample for sample in epoch if sample[1] >= 4} for epoch in epochs)
    assert not first & second
    assert first == third


@given(counts, st.integers(1, 16), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_a_step_needs_no_history(table, global_batch_size, step):
    assume(np.sum(table))
    used = order_of(table, global_batch_size)
    walked(used, 0, step)
    assert samples(used.batch(step)) == samples(order_of(table, global_batch_size).batch(step))


@given(counts, st.integers(1, 9), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_a_stage_of_the_run_has_an_order_of_its_own_from_its_first_step_on(table, global_batch_size, first):
    assume(np.sum(table))
    used = order_of(table, global_batch_size, first_step=first)
    assert used.batches_before(0) == first
    epoch = Counter(sample for batch in walked(used, first, used.batches_before(1)) for sample in batch)
    assert set(epoch.values()) <= {1}
    many = [[40, 30], [50, 20]]  # no two of these orders are equal by chance
    orders = [walked(order_of(many, 5, first_step=step), step, step + 10) for step in (0, first, first + 1)]
    assert orders[0] != orders[1] != orders[2]


@given(grown, st.integers(1, 9), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_added_parts_leave_what_was_planned_and_all_come_in_the_next_epoch(both, global_batch_size, step):
    table, more = both
    assume(np.sum(table))
    before = order_of(table, global_batch_size)
    first = before.epoch_of(step) + 1
    stages = (EpochStage(0, len(table)), EpochStage(first, len(table) + len(more)))
    after = order_of([*table, *more], global_batch_size, stages=stages)
    planned = before.batches_before(first)
    assert walked(after, 0, planned) == walked(before, 0, planned)
    # Each bucket's stream continues: from the stage on, every sample of old and new parts comes once an epoch.
    seen, whole = Counter(), np.array([*table, *more])
    stop = after.batches_before(first + 3)
    for batch in walked(after, 0, stop):
        seen.update(batch)
    for bucket, total in enumerate(whole.sum(0).tolist()):
        taken = sum(times for (found, _, _), times in seen.items() if found == bucket)
        due = first * sum(each[bucket] for each in table) + 3 * total
        assert 0 <= due - taken < global_batch_size
        new = range(len(table), len(whole))
        times = [seen[bucket, part, row] for part in new for row in range(whole[part, bucket])]
        assert not times or max(times) <= 3
        assert sum(3 - each for each in times) <= due - taken


def test_a_bucket_that_comes_later_does_not_disturb_the_others():
    old = np.array([[3, 5], [4, 2], [6, 1]])
    first = order_of(old, 4)
    stages = (EpochStage(0, 3), EpochStage(2, 5))
    wider = np.zeros((5, 3), np.int64)
    wider[:3, [0, 2]], wider[3:, 1] = old, 7  # the new shape sorts between the two
    later = Order(wider, (SHAPES[0], (4, 4, 5), SHAPES[1]), 4, 0, stages=stages, window_parts=3)
    column = {0: 0, 2: 1}
    for step in range(first.batches_before(2)):
        one, other = first.batch(step), later.batch(step)
        assert column[other.bucket] == one.bucket
        assert (other.parts.tolist(), other.rows.tolist()) == (one.parts.tolist(), one.rows.tolist())


@pytest.mark.parametrize("resumed", [0, 1, 7, 23])
def test_the_remaining_order_is_the_same_on_any_number_of_ranks(resumed):
    table = np.random.default_rng(0).integers(0, 40, (30, 3))
    whole = walked(order_of(table, 16), resumed, 60)
    for ranks in (1, 2, 4, 8):
        micro = 16 // ranks
        order = order_of(table, 16)  # nothing of an earlier process
        shares = [
            [samples(order.batch(step))[rank * micro : (rank + 1) * micro] for rank in range(ranks)]
            for step in range(resumed, 60)
        ]
        assert [[sample for share in step for sample in share] for step in shares] == whole


def test_rows_are_shuffled_within_windows_of_parts():
    table = np.full((40, 1), 10)
    order = order_of(table, 10, window_parts=4)
    for window in range(10):
        parts = {part for batch in walked(order, window * 4, window * 4 + 4) for _, part, _ in batch}
        assert len(parts) == 4
    first = [sample for batch in walked(order, 0, 4) for sample in batch]
    assert first != sorted(first)
    assert len({part for _, part, _ in first[:10]}) > 1


def test_small_buckets_are_carried_over_and_come():
    order = order_of([[10, 1], [10, 1]], 8)
    seen = Counter(sample for batch in walked(order, 0, 44) for sample in batch)
    assert [seen[1, part, 0] for part in (0, 1)] == [16, 16]
    assert order.epoch_of(0) == 0
    assert [order.batches_before(epoch) for epoch in range(5)] == [0, 2, 5, 7, 11]


def test_seeds_change_the_order_and_the_samples():
    one, other = (order_of([[50], [50]], 10, seed) for seed in (0, 1))
    assert samples(one.batch(0)) != samples(other.batch(0))
    assert samples(one.batch(0)) != samples(one.batch(10))
    seeds = {sample_seed(s, step, i) for s in range(2) for step in range(5) for i in range(10)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
