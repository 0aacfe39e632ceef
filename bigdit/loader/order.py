"""Which samples make up which global batch: a pure function of (seed, step), with nothing to save or restore.

Each bucket is an endless stream, one permutation of its samples after another, cut into global batches; a
remainder at the end of an epoch opens the next batch, so no sample is lost. In each epoch the batches that end
in it, of all buckets, come in a shuffled order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class GlobalBatch:
    """`positions` [global_batch_size]: samples of the bucket numbered `bucket`."""

    bucket: int
    positions: npt.NDArray[np.int64]


class Order:
    """The order of training over buckets of the given sizes."""

    def __init__(self, bucket_sizes: Sequence[int], global_batch_size: int, seed: int) -> None:
        self.bucket_sizes = tuple(bucket_sizes)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._permutation = functools.lru_cache(maxsize=2 * len(self.bucket_sizes))(self._draw_permutation)
        self._schedule = functools.lru_cache(maxsize=2)(self._draw_schedule)

    def epoch_of(self, step: int) -> int:
        """The epoch in which the batch of this step ends."""
        epoch = step * self.global_batch_size // sum(self.bucket_sizes)
        while self._batches_before(epoch) > step:
            epoch -= 1
        while self._batches_before(epoch + 1) <= step:
            epoch += 1
        return epoch

    def batch(self, step: int) -> GlobalBatch:
        """The samples of this step."""
        epoch = self.epoch_of(step)
        bucket, index = self._schedule(epoch)[step - self._batches_before(epoch)]
        size = self.bucket_sizes[bucket]
        stream = np.arange(index * self.global_batch_size, (index + 1) * self.global_batch_size)
        epochs, places = np.divmod(stream, size)
        positions = np.empty(len(stream), np.int64)
        for e in np.unique(epochs):
            here = epochs == e
            positions[here] = self._permutation(bucket, int(e))[places[here]]
        return GlobalBatch(bucket, positions)

    def _batches_before(self, epoch: int) -> int:
        return sum(epoch * size // self.global_batch_size for size in self.bucket_sizes)

    def _draw_schedule(self, epoch: int) -> list[tuple[int, int]]:
        """(bucket, index in the bucket's stream) of the batches that end in this epoch, shuffled across buckets."""
        counts = [
            range(epoch * size // self.global_batch_size, (epoch + 1) * size // self.global_batch_size)
            for size in self.bucket_sizes
        ]
        turns = np.repeat(np.arange(len(counts)), [len(count) for count in counts])
        self._generator(epoch, len(self.bucket_sizes)).shuffle(turns)
        queues = [iter(count) for count in counts]
        return [(int(bucket), next(queues[bucket])) for bucket in turns]

    def _draw_permutation(self, bucket: int, epoch: int) -> npt.NDArray[np.int64]:
        return self._generator(epoch, bucket).permutation(self.bucket_sizes[bucket])

    def _generator(self, epoch: int, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, epoch, stream))))


def sample_seed(seed: int, step: int, position: int) -> int:
    """The 63-bit seed of all randomness of the sample at `position` in the global batch of `step`."""
    digest = hashlib.blake2b(f"{seed}/{step}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
