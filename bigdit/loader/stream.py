"""This process's micro-batches, read from the store ahead of the step."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

from bigdit.dist import World
from bigdit.loader.batch import Batch, CaptionedBatch, read_ahead
from bigdit.loader.order import Ints, Order, sample_seed
from bigdit.loader.raw_store import RawReader, RawStore
from bigdit.loader.read import BatchReader
from bigdit.store import FeatureStore
from bigdit.store.part import Shape

ADVISED_AHEAD = 8
"""Micro-batches that the system is asked to fetch before they are read: a disk's queue stays full, and they take the
page cache's memory alone."""


Micro = Batch | CaptionedBatch
"""A micro-batch: features, or what they are made of."""


class FeatureStream:
    """Micro-batches of a store, or of pictures that are not encoded yet, for one process of `world`; every process sees
    its share of the same order."""

    def __init__(
        self,
        store: FeatureStore | RawStore,
        world: World,
        order: Order,
        *,
        micro_batch_size: int,
        grad_accum_steps: int,
        seed: int,
        caption_dropout: float,
        no_class: int | None = None,
        read_ahead_steps: int = 2,
        threads: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.order = order
        self._world = world
        self._micro_batch_size = micro_batch_size
        self._grad_accum_steps = grad_accum_steps
        self._seed = seed
        self._read_ahead_steps = read_ahead_steps
        self._threads = threads
        self._buckets = list(store.buckets)
        self._reader: BatchReader | RawReader = (
            RawReader(store, caption_dropout, pinned=pin_memory, no_class=no_class)
            if isinstance(store, RawStore)
            else BatchReader(store, micro_batch_size, caption_dropout, pinned=pin_memory, no_class=no_class)
        )
        self._lock = threading.Lock()
        self._advised = 0  # the first step that the system was not told of

    def steps(self, start: int, stop: int) -> Generator[list[Micro]]:
        """The micro-batches of steps [start, stop), `read_ahead_steps` of them read ahead by threads, a step each."""
        readers = ThreadPoolExecutor(self._threads, thread_name_prefix="loader")
        try:
            yield from read_ahead(
                lambda step: self._fetched(step, stop), range(start, stop), self._read_ahead_steps, readers
            )
        finally:
            readers.shutdown(cancel_futures=True)

    def micro_batches(self, step: int) -> list[Micro]:
        """The grad_accum_steps micro-batches of this process in this step."""
        return [self._reader.read(*each) for each in self.samples(step)]

    def _fetched(self, step: int, stop: int) -> list[Micro]:
        """The micro-batches of a step, after the system was told of those that follow."""
        last = min(step + 1 + -(-ADVISED_AHEAD // self._grad_accum_steps), stop)
        with self._lock:
            first, self._advised = max(self._advised, step + 1), max(self._advised, last)
        for ahead in range(first, last):
            for each in self.samples(ahead):
                self._reader.advise(*each)
        return self.micro_batches(step)

    def samples(self, step: int) -> list[tuple[Shape, Ints, Ints, tuple[int, ...]]]:
        """Bucket, parts, rows and seeds of each micro-batch of this process in this step."""
        batch = self.order.batch(step)
        micro, size = self._micro_batch_size, self._world.world_size
        starts = [(i * size + self._world.rank) * micro for i in range(self._grad_accum_steps)]
        return [
            (
                self._buckets[batch.bucket],
                batch.parts[start : start + micro],
                batch.rows[start : start + micro],
                tuple(sample_seed(self._seed, step, place) for place in range(start, start + micro)),
            )
            for start in starts
        ]
