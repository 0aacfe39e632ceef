"""The order of samples: nothing lost, nothing twice, the same for every split of the global batch."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from bigdit.loader.order import Order, sample_seed

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(sizes, st.integers(1, 16), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_sample_comes_once_an_epoch(bucket_sizes, global_batch_size, seed):
    order = Order(bucket_sizes, global_batch_size, seed)
    seen = [Counter() for _ in bucket_sizes]
    for step in range(60):
        batch = order.batch(step)
        assert len(batch.positions) == global_batch_size
        seen[batch.bucket].update(batch.positions.tolist())
    for size, counts in zip(bucket_sizes, seen, strict=True):
        times = [counts[i] for i in range(size)]
        assert max(times) - min(times) <= 1


@given(sizes, st.integers(1, 16), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_a_step_needs_no_history(bucket_sizes, global_batch_size, step):
    walked = Order(bucket_sizes, global_batch_size, 0)
    for earlier in range(0, step, 7):
        walked.batch(earlier)
    fresh = Order(bucket_sizes, global_batch_size, 0)
    assert walked.batch(step).bucket == fresh.batch(step).bucket
    assert walked.batch(step).positions.tolist() == fresh.batch(step).positions.tolist()


def test_epochs_advance_by_the_data_seen():
    order = Order([10, 7], 4, seed=0)
    assert order.epoch_of(0) == 0
    assert [order.epoch_of(step) for step in (2, 3, 7)] == [0, 1, 1]
    assert [order._batches_before(epoch) for epoch in range(4)] == [0, 3, 8, 12]


def test_seeds_change_the_order_and_the_samples():
    one, other = Order([100], 10, seed=0), Order([100], 10, seed=1)
    assert one.batch(0).positions.tolist() != other.batch(0).positions.tolist()
    assert one.batch(0).positions.tolist() != one.batch(10).positions.tolist()
    seeds = {sample_seed(s, step, i) for s in range(2) for step in range(5) for i in range(10)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
