"""Prints, as JSON, the CPU memory that a plan predicts for batches, that of one batch, and what the loader takes.

In a process of its own: what a test runner frees meanwhile would be counted as the loader's.
"""

import ctypes
import gc
import json
import sys
import time
from contextlib import closing
from pathlib import Path

import stores
import torch

from bigdit.profile.steps import batch as profiled_batch
from bigdit.profile.steps import step_batches
from bigdit.store import FeatureStore
from bigdit.store.text import Text
from bigdit.strategy import BatchShape, Strategy

MICRO, AHEAD = 32, 5


def anonymous():
    """Bytes of this process's own memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory would be used again, and not be counted
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def predicted():
    """Bytes of all batches that a plan's step holds, and of one."""
    strategy = Strategy(micro_batch_size=MICRO, read_ahead_steps=AHEAD)
    shape = BatchShape(latents=(4, 64, 64), latents_dtype="bf16", text=(64, 512))
    live = []
    fed = step_batches(lambda: profiled_batch(shape, strategy), strategy, pin=False, on_batch=live.append)
    next(fed)
    sizes = [sum(tensor.nbytes for tensor in batch.tensors()) for batch in live]
    return sum(sizes), sizes[0]


def taken(folder):
    """The most bytes while batches of that size are read."""
    stores.SHAPES, stores.TOKENS, stores.DIM = [(4, 64, 64), (4, 32, 128)], 64, 512
    stores.NULL = Text(torch.full((2, 512), 7.0))
    stores.make_store(folder, 96)
    store = FeatureStore.open(folder)
    stores.read_all(store, 1, micro=MICRO)  # what is imported and started once
    before, most = anonymous(), 0
    with closing(stores.stream_of(store, micro=MICRO, read_ahead_steps=AHEAD).steps(0, 24)) as steps:
        for step, (batch,) in enumerate(steps):
            batch.text_embeds[:, -1] = 0  # the process owns every page, as when it copies to a device
            if step < 3:
                time.sleep(1)  # on a busy machine the threads need time to read ahead
            most = max(most, anonymous() - before)
            del batch
    return most


if __name__ == "__main__":
    every, one = predicted()
    print(json.dumps([every, one, taken(Path(sys.argv[1]))]))
