"""CPU memory of profiled steps equals that of a real stream, pinned; and weights that are never written."""

from __future__ import annotations

import gc
import itertools
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import SANA
from torch import nn

from bigdit.dist import World
from bigdit.loader.batch import Batch
from bigdit.loader.order import Order
from bigdit.loader.stream import FeatureStream
from bigdit.memory import Block, HostMemory, Span, Timeline, host_memory, pinned_bytes
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.steps import batch, step_batches
from bigdit.profile.unwritten import unwritten_weights
from bigdit.store import FeatureStore
from bigdit.strategy import BatchShape, Strategy


def _held() -> int:
    """Bytes of all existing batches, each storage once."""
    gc.collect()
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for found in gc.get_referrers(Batch)
        if type(found) is Batch
        for tensor in found.tensors()
    }
    return sum(storages.values())


def _settled() -> int:
    """`_held` once the reading thread has finished: equal twice in a row, a moment apart."""
    last = -1
    while (now := _held()) != last:
        last = now
        time.sleep(0.2)
    return now


@pytest.fixture
def no_batch() -> None:
    """Start without batches, and let `_held` see only later objects: looking through all libraries takes a second."""
    assert _held() == 0
    gc.freeze()


@pytest.mark.usefixtures("no_batch")
@pytest.mark.parametrize(("ahead", "grad_accum"), [(0, 1), (2, 2), (3, 1)])
def test_the_real_stream_holds_what_profiled_steps_hold(features: Path, ahead: int, grad_accum: int) -> None:
    """Bytes of all batches during a step: the store's thread beside zeros of the same buckets."""
    store = FeatureStore.open(features)
    buckets = sorted(store.buckets)
    strategy = Strategy(micro_batch_size=3, grad_accum_steps=grad_accum, read_ahead_steps=ahead)
    stream = FeatureStream(
        store,
        World(),
        Order(store.index.counts, store.index.shapes, 3 * grad_accum, seed=0),
        micro_batch_size=strategy.micro_batch_size,
        grad_accum_steps=grad_accum,
        seed=0,
        caption_dropout=0.1,
        read_ahead_steps=ahead,
    )
    numbers = itertools.count()

    def make() -> Batch:
        bucket = buckets[stream.order.batch(next(numbers) // grad_accum).bucket]
        return batch(BatchShape(latents=bucket, text=(store.max_tokens, store.null_text.states.shape[1])), strategy)

    real, profiled = [], []
    with closing(stream.steps(0, 50)) as steps:
        for _ in range(3):
            trained = next(steps)
            real.append(_settled())
            del trained
    with closing(step_batches(make, strategy, pin=False)) as steps:
        for _ in range(3):
            trained = next(steps)
            profiled.append(_held())
            del trained
    assert profiled == real
    text = store.max_tokens * (store.null_text.states.shape[1] + 1) * 2
    assert min(real) > (ahead + 1) * grad_accum * strategy.micro_batch_size * text


@pytest.mark.slow
def test_next_to_a_gpu_batches_wait_pinned_on_the_host(gpus: EmulatedGpus) -> None:
    """The host's timeline has read_ahead_steps + 1 steps of pinned inputs."""
    shape = BatchShape(latents=(4, 8, 8), text=(6, 12))
    strategy = Strategy(micro_batch_size=2, grad_accum_steps=2, read_ahead_steps=3)
    host = gpus.profile(StepRequest(model=SANA, batch=shape, strategy=strategy)).host_timeline
    one = [tensor.nbytes for tensor in batch(shape, strategy).tensors()]
    live = most = 0
    for event in host.events:
        block = host.blocks[abs(event) - 1]
        if block.category == "input":
            assert block.pinned
            live += block.nbytes if event > 0 else -block.nbytes
            most = max(most, live)
    assert most == (3 + 1) * 2 * sum(one)
    locked = sum(4 * 2 * pinned_bytes(nbytes) for nbytes in one)
    assert host_memory(host).page_locked_bytes == locked


@given(st.integers(1, 1 << 40))
def test_pinned_blocks_are_the_next_power_of_two(nbytes: int) -> None:
    size = pinned_bytes(nbytes)
    assert size.bit_count() == 1
    assert size >= nbytes > size // 2


def test_a_freed_pinned_block_stays_and_serves_its_own_size_again() -> None:
    pinned = [Block(nbytes, "input", "", pinned=True) for nbytes in (5, 7, 9, 8)]
    pageable = Block(100, "input", "")
    timeline = Timeline((*pinned, pageable), (1, -1, 2, 3, -2, 4, 5, -5), (Span("init", 0, 8),))
    # 8 for the first; the second, and after its end the fourth, use them again; 16 for the third.
    assert host_memory(timeline) == HostMemory(peak_bytes=8 + 16 + 100, steps_bytes=8 + 16, page_locked_bytes=8 + 16)
    assert pinned_bytes(0) == 0


def test_large_weights_have_no_pages_and_small_ones_are_drawn() -> None:
    """Old content of small ones' memory may be infinite, and every step would be skipped."""
    before = nn.init.kaiming_uniform_, nn.Module._apply
    with unwritten_weights():
        layer = nn.Linear(1 << 16, 1 << 16).to(torch.bfloat16)  # 8 GiB that nobody writes
        small = nn.Linear(16, 16)
    assert layer.weight.shape == (1 << 16, 1 << 16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert 0.1 < float(small.weight.detach().std()) < float(small.weight.detach().abs().max()) <= 0.25
    assert (nn.init.kaiming_uniform_, nn.Module._apply) == before
