"""The samples of a step by name, as their store has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigdit.loader.batch import Batch, CaptionedBatch
from bigdit.loader.raw_store import RawStore
from bigdit.loader.stream import FeatureStream
from bigdit.store import FeatureStore

MOST = 4
"""Samples that a line names; it counts the others."""


class Samples:
    """Names the samples of steps of a stream over a store."""

    def __init__(self, store: FeatureStore | RawStore, stream: FeatureStream) -> None:
        self._store = store
        self._stream = stream

    def of_step(self, step: int) -> str:
        """Those of the global batch, of all processes, of the step with which `step` are finished, as a line ends with
        them."""
        batch = self._stream.order.batch(step - 1)
        bucket = list(self._store.buckets)[batch.bucket]
        places = list(zip(batch.parts.tolist(), batch.rows.tolist(), strict=True))
        names = [self._store.name_of(bucket, *place) for place in places[:MOST]]
        return f"its samples are {listed(names, len(places))}"

    def not_finite(self, step: int, micro_batches: Sequence[Batch | CaptionedBatch]) -> list[str]:
        """Those of this process's micro-batches of that step that came with a value that is not finite."""
        return [
            self._store.name_of(bucket, int(parts[place]), int(rows[place]))
            for batch, (bucket, parts, rows, _) in zip(micro_batches, self._stream.samples(step - 1), strict=True)
            for place in _not_finite(batch)
        ]


def listed(names: Sequence[str], count: int) -> str:
    """The first few of `count` names."""
    first = ", ".join(names[:MOST])
    return first if count <= MOST else f"{first} and {count - MOST} more"


def _not_finite(batch: Batch | CaptionedBatch) -> list[int]:
    sound = torch.ones(len(batch.seeds), dtype=torch.bool)
    for tensor in batch.tensors():
        sound &= tensor.isfinite().reshape(len(batch.seeds), -1).all(1)
    return sound.logical_not().nonzero().flatten().tolist()
