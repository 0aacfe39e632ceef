"""The loader: batches drawn from seeds alone, in bounded memory, and its errors."""

import json
import sys
from collections import Counter
from contextlib import closing
from fractions import Fraction

import numpy as np
import pytest
import torch
from commands import HELPERS, ROOT, run_command
from stores import SHAPES, make_store, read_all, stream_of

from bigdit.catalog.encoders import POOLED_TEXT
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.loader.order import draw
from bigdit.loader.stages import data_state, plan_order
from bigdit.loader.stream import BatchReader
from bigdit.store import FeatureStore
from bigdit.store.part import part_path
from bigdit.store.text import dequantise, quantise


def indices_of(store, stream, step):
    return [
        int(store.part(part).rows[bucket][row, 0])
        for bucket, parts, rows, _ in stream.samples(step)
        for part, row in zip(parts.tolist(), rows.tolist(), strict=True)
    ]


def same(embeds, mask, text, kind):
    """Whether a sample's padded states and their mask are those of a text."""
    states = dequantise(*quantise(text.states)) if kind.get("eight_bits") else text.states.bfloat16()
    assert torch.equal(embeds[: len(states)], states)
    assert not embeds[len(states) :].any()  # memory that is used again is cleared
    assert mask.tolist() == [1.0] * text.shown + [0.0] * (len(mask) - text.shown)


@pytest.mark.parametrize("reader", ["pread", "mmap"])
@pytest.mark.parametrize(
    "kind",
    [
        *({}, {"pooled": True}, {"eight_bits": True, "pooled": True}, {"dtype": torch.float32}),
        *({"streams": True}, {"streams": True, "eight_bits": True, "pooled": True}),
    ],
    ids=str,
)
def test_batches_hold_what_was_encoded(tmp_path, reader, kind):
    truth = make_store(tmp_path / "store", **kind)
    store = FeatureStore.open(tmp_path / "store", reader)
    stream = stream_of(store)
    seen = Counter()
    with closing(stream.steps(0, 20)) as steps:
        for step, (batch,) in enumerate(steps):
            indices = indices_of(store, stream, step)
            seen.update(indices)
            for place, index in enumerate(indices):
                latents, (text,) = truth[index]
                assert torch.equal(batch.latents[place], latents)
                extras = {name: each[place] for name, each in batch.extras.items()}
                same(batch.text_embeds[place], batch.text_mask[place], text, kind)
                for name, each in text.streams.items():
                    same(extras.pop(name), extras.pop(f"{name}_mask"), each, kind)
                if kind.get("pooled"):
                    assert torch.equal(extras.pop(POOLED_TEXT), text.pooled.bfloat16())
                assert not extras
    assert len(seen) == 40


def test_memory_is_used_again_only_when_nothing_refers_to_it(tmp_path):
    make_store(tmp_path / "store")
    store = FeatureStore.open(tmp_path / "store")
    kept = [batch.text_embeds for batch in read_all(store, 20)]
    again = [batch.text_embeds for batch in read_all(store, 20)]
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
    assert len({each.data_ptr() for each in kept}) == 20
    pointers = set()
    with closing(stream_of(store, read_ahead_steps=1).steps(0, 20)) as steps:
        for (batch,) in steps:
            pointers.add(batch.text_embeds.data_ptr())
            graph = batch.text_embeds.float().requires_grad_()  # a view that lives somewhat longer than its batch
            del batch, graph
    assert len(pointers) <= 3


def test_dropped_captions_are_the_empty_one(tmp_path):
    make_store(tmp_path / "store", pooled=True)
    store = FeatureStore.open(tmp_path / "store")
    dropped = 0
    for batch in read_all(store, 40, caption_dropout=0.5):
        for place, seed in enumerate(batch.seeds):
            is_null = bool((batch.text_embeds[place, :2] == 7.0).all())
            assert is_null == (draw(seed, b"dropout") < 0.5) == bool((batch.extras[POOLED_TEXT][place] == 9.0).all())
            dropped += is_null
    assert 55 < dropped < 105  # of 160, five deviations of the binomial


def test_dropped_captions_are_the_empty_one_in_every_stream(tmp_path):
    make_store(tmp_path / "store", streams=True)
    store = FeatureStore.open(tmp_path / "store")
    assert store.null_text.sequences.keys() == store.text_shapes.keys() == {"text", "glyphs", "layers"}
    found = Counter()
    for batch in read_all(store, 20, caption_dropout=0.5):
        for place, seed in enumerate(batch.seeds):
            extras = {name: each[place] for name, each in batch.extras.items()}
            if dropped := draw(seed, b"dropout") < 0.5:
                same(batch.text_embeds[place], batch.text_mask[place], store.null_text, {})
                for name, each in store.null_text.streams.items():
                    same(extras[name], extras[f"{name}_mask"], each, {})
            found[dropped, bool((extras["layers"] == 8.0).all()), int(extras["layers_mask"].sum())] += 1
    assert found.keys() == {(True, True, 3), (False, False, 2)}


def test_captions_are_drawn_by_their_weights(tmp_path):
    truth = make_store(tmp_path / "store", count=8, several=True)
    store = FeatureStore.open(tmp_path / "store")
    reader = BatchReader(store, 1, 0.0, pinned=False)
    (row, index) = next((row, int(each[0])) for row, each in enumerate(store.part(0).rows[SHAPES[0]]))
    found = Counter()
    for seed in range(400):
        batch = reader.read(SHAPES[0], np.array([0]), np.array([row]), [seed])
        length = int(batch.text_mask.sum())
        text = batch.text_embeds[0, :length]
        (which,) = [i for i, each in enumerate(truth[index][1]) if torch.equal(each.states.bfloat16(), text)]
        found[which] += 1
        again = reader.read(SHAPES[0], np.array([0]), np.array([row]), [seed])
        assert torch.equal(again.text_embeds, batch.text_embeds)
    assert 255 < found[1] < 345  # 300 of 400, five deviations


def test_latents_are_drawn_again_from_mean_and_deviation(tmp_path):
    truth = make_store(tmp_path / "store", count=8, deviation=True)
    store = FeatureStore.open(tmp_path / "store")
    reader = BatchReader(store, 2, 0.0, pinned=False)
    index = int(store.part(0).rows[SHAPES[0]][0, 0])
    mean, deviation = truth[index][0].float()

    def drawn(seeds):
        return reader.read(SHAPES[0], np.zeros(2, int), np.zeros(2, int), seeds).latents.clone()

    samples = torch.cat([drawn([seed, 1000 + seed]) for seed in range(200)])
    noise = (samples - mean) / deviation
    assert samples.dtype == torch.float32
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05
    assert torch.equal(drawn([3, 4]), drawn([4, 3]).flip(0))
    assert not torch.equal(*drawn([3, 4]))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_share_the_same_samples_after_a_resume_in_mid_epoch(tmp_path, ranks):
    make_store(tmp_path / "store")
    store = FeatureStore.open(tmp_path / "store")
    (alone,) = zip(*stream_of(store, micro=8).steps(3, 7), strict=True)
    for step, whole in zip(range(3, 7), alone, strict=True):
        shares = []
        for rank in range(ranks):
            world = World(rank=rank, world_size=ranks)
            shares += stream_of(store, micro=8 // ranks, world=world).micro_batches(step)
        assert [seed for share in shares for seed in share.seeds] == list(whole.seeds)
        assert torch.equal(torch.cat([share.latents for share in shares]), whole.latents)
        assert torch.equal(torch.cat([share.text_embeds for share in shares]), whole.text_embeds)


def test_a_bit_that_flips_while_training_ends_it_with_the_part(tmp_path):
    make_store(tmp_path / "store")
    store = FeatureStore.open(tmp_path / "store")
    stream = stream_of(store)
    file = part_path(tmp_path / "store", 8, 16)
    data = bytearray(file.read_bytes())
    store.part(1)  # open, with its tables
    offset = store.part(1).header.columns["text"].offset
    data[offset:] = bytes(255 - byte for byte in data[offset:])
    with open(file, "r+b") as opened:
        opened.write(data)
    with pytest.raises(UserError, match=r"part-0+8-0+16\.safetensors is damaged in caption \d+: its digest differs"):
        list(stream.steps(0, 10))


def test_added_data_enters_with_the_next_epoch_and_is_reported(tmp_path):
    root = tmp_path / "store"
    make_store(root, 40)
    store = FeatureStore.open(root)
    order, notices = plan_order(store, 4, 0, None, 0, tmp_path)
    assert notices == []
    saved = data_state(store, order, 0).model_dump(mode="json")
    before = [order.batch(step) for step in range(12)]
    make_store(root, 56)
    grown = FeatureStore.open(root)
    again, notices = plan_order(grown, 4, 0, saved, 5, tmp_path)
    assert [(stage.first_epoch, stage.parts) for stage in again.stages] == [(0, 5), (1, 7)]
    assert f"{root} has 2 parts more (16 samples) than before: new samples enter with epoch 1" in notices[0]
    for step, batch in enumerate(before[: again.batches_before(1)]):
        assert batch.parts.tolist() == again.batch(step).parts.tolist()
    assert max(again.batch(step).parts.max() for step in range(10, 24)) == 6
    saved = data_state(grown, again, 0).model_dump(mode="json")
    assert plan_order(grown, 4, 0, saved, 13, tmp_path)[0].stages == again.stages
    with pytest.raises(UserError, match=r"global_batch_size\) is 8, and .* was trained with 4.*set it to 4"):
        plan_order(grown, 8, 0, saved, 13, tmp_path)
    with pytest.raises(UserError, match=r"does not begin with the 7 parts that"):
        plan_order(store, 4, 0, saved, 13, tmp_path)
    with pytest.raises(UserError, match=r"has a damaged state of its data"):
        plan_order(store, 4, 0, {"seed": 0}, 13, tmp_path)


def test_rates_of_sources_are_those_of_the_checkpoint(tmp_path):
    root = tmp_path / "store"
    make_store(root, 40)
    store = FeatureStore.open(root)
    twice = [Fraction(2)]
    order, _ = plan_order(store, 4, 0, None, 0, tmp_path, rates=twice)
    saved = data_state(store, order, 0).model_dump(mode="json")
    again, notices = plan_order(store, 4, 0, saved, 5, tmp_path, rates=twice)
    assert notices == []
    for step in range(5, 40):
        one, other = order.batch(step), again.batch(step)
        assert (one.parts.tolist(), one.rows.tolist()) == (other.parts.tolist(), other.rows.tolist())
    with pytest.raises(UserError, match=r"images\[0\]: repeats × weight is 1, and .* was trained with 2: samples"):
        plan_order(store, 4, 0, saved, 5, tmp_path, rates=[Fraction(1)])
    before = saved | {"rates": []}  # of an earlier version
    with pytest.raises(UserError, match=r"repeats × weight is 2, and .* was trained with 1"):
        plan_order(store, 4, 0, before, 5, tmp_path, rates=twice)
    two = store.schema.model_copy(update={"sources": [*store.schema.sources, {"count": 8}]})
    store.schema = two
    with pytest.raises(UserError, match=r"data\.images has 1 source with repeats or weight, and .* has 2; list"):
        plan_order(store, 4, 0, None, 0, tmp_path, rates=twice)


def test_small_buckets_are_reported_of(tmp_path):
    make_store(tmp_path / "store", 40)
    _, notices = plan_order(FeatureStore.open(tmp_path / "store"), 16, 0, None, 0, tmp_path)
    assert notices == [
        "bucket 4x4x8 has 14 samples, fewer than a global batch of 16 (strategy.global_batch_size): each of its "
        "batches takes 1.1 epochs of them, and repeats samples"
    ]
    order, notices = plan_order(FeatureStore.open(tmp_path / "store"), 64, 0, None, 0, tmp_path)
    assert notices == [
        "data.features has 40 samples, fewer than a global batch of 64 (strategy.global_batch_size): each step takes "
        "more than an epoch, and repeats samples; lower strategy.global_batch_size, or add images"
    ]
    first = order.batch(0)
    seen = Counter(zip(first.parts.tolist(), first.rows.tolist(), strict=True))
    assert max(seen.values()) > 1
    assert len(seen) == FeatureStore.open(tmp_path / "store").index.counts[:, first.bucket].sum()
    make_store(tmp_path / "store", 40, buckets=((12, 12), (8, 16), (64, 64)))
    _, notices = plan_order(FeatureStore.open(tmp_path / "store"), 8, 0, None, 0, tmp_path)
    assert notices == ["1 of 3 data.buckets have no samples: all latents are 4x4x8, 4x6x6"]


def test_an_index_spares_the_headers_and_is_made_again_where_it_is_wrong(tmp_path):
    root = tmp_path / "store"
    make_store(root)
    whole = FeatureStore.open(root)
    index = root / "index.safetensors"
    assert index.exists()
    written = index.stat().st_mtime_ns
    FeatureStore.open(root)
    assert index.stat().st_mtime_ns == written
    for damage in (b"", index.read_bytes()[:-3], index.read_bytes()[:-8] + b"\1" * 8):
        index.write_bytes(damage)
        again = FeatureStore.open(root)
        assert np.array_equal(again.index.counts, whole.index.counts)
        assert np.array_equal(again.index.parts, whole.index.parts)


@pytest.mark.timeout(120)
def test_the_host_memory_that_is_predicted_is_what_the_loader_takes(tmp_path):
    script = ROOT / "tests/loader/host_memory.py"
    done = run_command(sys.executable, script, tmp_path / "store", PYTHONPATH=HELPERS)
    assert done.returncode == 0, done.stderr
    predicted, one, most = json.loads(done.stdout)
    assert predicted == 6 * one  # five are read ahead
    # Tables and headers of open parts, and Python's own: a few MB. Texts are shorter than max_tokens, and untouched
    # padding takes no memory.
    assert 0.5 * predicted <= most <= predicted + one + 8 * 2**20
