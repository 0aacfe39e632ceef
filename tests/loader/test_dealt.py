"""The micro-batches of a step are equal work for all processes, whatever their buckets and captions."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stores import make_store, stream_of
from views import counted_flops

from bigdit import models
from bigdit.catalog.families import LOSS_MASK
from bigdit.dist import World
from bigdit.loader.order import dealt, sample_seed
from bigdit.loader.stream import FeatureStream
from bigdit.models.build import build
from bigdit.store import FeatureStore
from bigdit.strategy import ModelSpec

RANKS, MICRO, PASSES = 4, 3, 2
SIZES = {"num_attention_heads": 2, "in_channels": 4, "num_layers": 2, "sample_size": 8, "patch_size": 2}
LUMINA = SIZES | {
    "hidden_size": 24,
    "num_refiner_layers": 1,
    "num_kv_heads": 1,
    "multiple_of": 8,
    "axes_dim_rope": [4, 4, 4],
    "axes_lens": [20, 20, 20],
    "cap_feat_dim": 16,
}
PIXART = SIZES | {"attention_head_dim": 8, "out_channels": 8, "cross_attention_dim": 16, "caption_channels": 16}


def spec(class_name, kwargs):
    return ModelSpec(name="tiny", class_name=class_name, kwargs=kwargs)


WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 2,
}

# Captions lose their padding, except for the longest of a micro-batch.
BY_TEXT = spec("Lumina2Transformer2DModel", LUMINA)
PIXELS = ((4, 6, 6), (4, 4, 8), (4, 8, 4), (4, 4, 10), (4, 10, 4))
FRAMES = ((4, 1, 4, 6), (4, 2, 4, 6), (4, 3, 4, 6), (4, 5, 4, 6))
MIXES = {
    "images by aspect": (spec("PixArtTransformer2DModel", PIXART), PIXELS),
    "videos by frames": (spec("WanTransformer3DModel", WAN), FRAMES),
    "both": (spec("WanTransformer3DModel", WAN), (*FRAMES, (4, 1, 6, 4), (4, 3, 6, 4), (4, 2, 4, 4))),
}


@given(st.lists(st.integers(0, 300), min_size=24, max_size=24), st.sampled_from([(1, 4), (2, 3), (6, 4), (1, 1)]))
def test_each_sample_is_dealt_once_and_long_texts_go_round(lengths, sizes):
    found = dealt(np.array(lengths), *sizes)
    assert found.shape == (*sizes, 24 // sizes[0] // sizes[1])
    assert sorted(found.ravel().tolist()) == [*range(24)]
    of = np.array(lengths)[found]
    assert (of[:-1].min((1, 2)) >= of[1:].max((1, 2))).all()  # a pass has longer texts than the next one
    tallest = of.max(2)
    whole = np.sort(of.reshape(sizes[0], -1))[:, ::-1]
    assert (tallest.min(1) == whole[:, sizes[1] - 1]).all()
    sums = of.sum(2)
    assert (np.ptp(sums, axis=1) <= np.ptp(whole, axis=1)).all()  # no more apart than two texts


def streams(store, **options):
    worlds = [World(rank=rank, world_size=RANKS) for rank in range(RANKS)]
    return [stream_of(store, MICRO, PASSES, world, caption_dropout=0.2, **options) for world in worlds]


def test_the_global_batch_stays_as_it_is_with_the_same_seeds(tmp_path):
    """On any number of processes, so that a run can resume on another."""
    make_store(tmp_path / "store", count=200, several=True)
    store = FeatureStore.open(tmp_path / "store")
    alone = stream_of(store, MICRO, PASSES * RANKS)
    for step in range(20):
        batch = alone.order.batch(step)
        wanted = {
            (part, row, sample_seed(0, step, place))
            for place, (part, row) in enumerate(zip(batch.parts.tolist(), batch.rows.tolist(), strict=True))
        }
        for dealt_to in (streams(store), streams(store, by_text=True), [alone]):
            found = Counter(
                sample
                for each in dealt_to
                for _, parts, rows, seeds in each.samples(step)
                for sample in zip(parts.tolist(), rows.tolist(), seeds, strict=True)
            )
            assert found == Counter(wanted)


STEPS = 3


def works(store, chosen, **options):
    """FLOPs [steps, processes, passes] of the micro-batches in the model's forward pass."""
    family, model = models.family(chosen.class_name), build(chosen, device="cpu", dtype=torch.float32, seed=0)

    def work(batch):
        batch = batch.to(torch.device("cpu"), torch.float32)
        return counted_flops(lambda: family.predict(model, batch.latents, torch.full((MICRO,), 0.5), batch))

    dealt_to = streams(store, **options)
    with torch.no_grad():
        return np.array(
            [[[work(batch) for batch in each.micro_batches(step)] for each in dealt_to] for step in range(STEPS)]
        )


@pytest.mark.parametrize("mix", MIXES)
def test_a_step_has_one_bucket_so_its_work_is_equal(tmp_path, mix):
    chosen, shapes = MIXES[mix]
    make_store(tmp_path / "store", count=200, several=True, shapes=shapes)
    found = works(FeatureStore.open(tmp_path / "store"), chosen)
    assert (found == found[:, :1]).all()
    assert len(set(found[:, 0, 0].tolist())) > 1  # of several buckets


def test_captions_are_dealt_so_that_work_is_equal(tmp_path):
    """The slowest process of each pass takes at most 5 % longer than the mean."""
    make_store(tmp_path / "store", count=200, several=True, shapes=PIXELS)
    store = FeatureStore.open(tmp_path / "store")
    before, after = (
        found.max(1).sum() / found.mean(1).sum() - 1
        for found in (works(store, BY_TEXT), works(store, BY_TEXT, by_text=True))
    )
    assert after < 0.05 < before


@pytest.mark.parametrize(("ranks", "micro", "passes"), [(3, 3, 3), (5, 4, 2), (7, 2, 2), (16, 3, 1)])
@pytest.mark.parametrize("by_text", [False, True])
def test_what_processes_do_not_divide_is_filled_up_with_weight_0(tmp_path, ranks, micro, passes, by_text):
    """A global batch of 24: each sample counts once, with its own seed."""
    make_store(tmp_path / "store", count=200, several=True)
    store = FeatureStore.open(tmp_path / "store")
    order = stream_of(store, 24).order
    options = {"caption_dropout": 0.0, "seed": 0, "loss_weights": [0.5], "by_text": by_text}
    for step in range(4):
        batch, counted, spread = order.batch(step), [], []
        for rank in range(ranks):
            world = World(rank=rank, world_size=ranks)
            stream = FeatureStream(store, world, order, micro_batch_size=micro, grad_accum_steps=passes, **options)
            own = len(counted)
            for found, (_, parts, rows, seeds) in zip(stream.micro_batches(step), stream.samples(step), strict=True):
                assert found.seeds == seeds
                for mask, *sample in zip(found.extras[LOSS_MASK], parts.tolist(), rows.tolist(), seeds, strict=True):
                    assert mask.unique().item() in (0, 0.5)
                    counted += [tuple(sample)] if mask.any() else []
            spread.append(len(counted) - own)
        assert sorted(counted) == sorted(
            (part, row, sample_seed(0, step, place))
            for place, (part, row) in enumerate(zip(batch.parts.tolist(), batch.rows.tolist(), strict=True))
        )
        assert by_text or max(spread) - min(spread) <= 1
