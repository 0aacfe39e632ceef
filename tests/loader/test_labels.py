"""Batches of a store with classes: a label for each sample, or that of no class, and no text."""

import pytest
import torch
from stores import stream_of

from bigdit.errors import UserError
from bigdit.loader.order import draw
from bigdit.loader.stages import data_state, plan_order
from bigdit.models import Extra
from bigdit.profile.steps import batch
from bigdit.store import FeatureStore
from bigdit.store.part import EncodedRange, part_path, write_part
from bigdit.store.schema import StoreSchema, claim, part_identity
from bigdit.strategy import BatchShape, Strategy

SHAPE, COUNT, PART = (4, 2, 2), 24, 8


@pytest.fixture
def store(tmp_path):
    """Sample i has latents of i, and class i % 5."""
    sources = [{"kind": "random", "count": COUNT}]
    schema = StoreSchema(codec={}, text_encoder={}, buckets=[(8, 8)], sources=sources, part_size=PART, classes=5)
    (tmp_path / "store").mkdir()
    claim(tmp_path / "store", schema)
    for start, end in schema.ranges():
        indices = list(range(start, end))
        latents = torch.tensor(indices, dtype=torch.bfloat16)[:, None, None, None].expand(-1, *SHAPE).contiguous()
        encoded = EncodedRange({SHAPE: latents}, {SHAPE: indices}, {}, {}, [], {index: index % 5 for index in indices})
        write_part(part_path(tmp_path / "store", start, end), encoded, identity=part_identity(schema, start))
    return FeatureStore.open(tmp_path / "store")


def batches(store, steps, **options):
    return [each for step in range(steps) for each in stream_of(store, **options).micro_batches(step)]


def test_each_sample_comes_with_its_class(store):
    seen = []
    for each in batches(store, COUNT // 4):
        assert (each.text_embeds, each.text_mask) == (None, None)
        labels, indices = each.extras["class_label"], each.latents[:, 0, 0, 0].int()
        assert labels.dtype == torch.int64
        assert labels.tolist() == [index % 5 for index in indices.tolist()]
        seen += indices.tolist()
    assert sorted(seen) == list(range(COUNT))


def test_dropped_classes_are_no_class(store):
    dropped = 0
    for each in batches(store, 40, caption_dropout=0.5, no_class=10):
        wanted = [draw(seed, b"dropout") < 0.5 for seed in each.seeds]
        assert [label == 10 for label in each.extras["class_label"].tolist()] == wanted
        dropped += sum(wanted)
    assert 55 < dropped < 105  # of 160, five deviations of the binomial


def test_ahead_of_the_step_the_same_is_read(store):
    stream = stream_of(store, caption_dropout=0.3, no_class=10)
    ahead = [each.extras["class_label"].tolist() for (each,) in stream.steps(0, 6)]
    assert ahead == [
        each.extras["class_label"].tolist() for each in batches(store, 6, caption_dropout=0.3, no_class=10)
    ]


def test_a_batch_is_as_large_as_the_profiled_one(store):
    """All its tensors, and the memory behind them."""
    shape = BatchShape(latents=SHAPE, latents_dtype="bf16")
    profiled = batch(shape, Strategy(micro_batch_size=4), {"class_label": Extra((), torch.int64)})
    found = batches(store, 1)[0]
    kinds = [
        [(tensor.shape, tensor.dtype, tensor.untyped_storage().nbytes()) for tensor in each.tensors()]
        for each in (found, profiled)
    ]
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) == 2


def test_a_run_does_not_go_on_with_other_classes(store, tmp_path):
    order, _ = plan_order(store, 4, 0, None, 0, tmp_path)
    saved = data_state(store, order, 0).model_dump(mode="json")
    assert saved["classes"] == 5
    again, _ = plan_order(store, 4, 0, saved, 3, tmp_path)
    assert again.batch(4).rows.tolist() == order.batch(4).rows.tolist()
    with pytest.raises(UserError, match=r"has other classes than .*, or in another order"):
        plan_order(store, 4, 0, saved | {"classes": ["a", "b", "c", "d", "e"]}, 3, tmp_path)
