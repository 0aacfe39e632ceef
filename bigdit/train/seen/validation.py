"""The loss of samples that training never sees, at fixed times and with fixed noise."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from bigdit import objectives
from bigdit.checkpoint import Peers
from bigdit.config.sight import ValidationConfig
from bigdit.engines import Ema, Engine, compute_dtype
from bigdit.loader.batch import Batch
from bigdit.loader.held_out import HeldOut
from bigdit.loader.read import BatchReader
from bigdit.models import Family
from bigdit.objective_spec import ObjectiveSpec
from bigdit.store import FeatureStore
from bigdit.train.step import predict_by


class Validation:
    """Measures the loss of what is `held` out, by forward passes of the engine that trains, of its micro-batch's size.

    All processes call it alike, and share the samples out. Nothing of training changes: weights and average are put
    back to the bit, and what is drawn comes from the samples' own seeds.
    """

    def __init__(
        self,
        config: ValidationConfig,
        store: FeatureStore,
        held: HeldOut,
        peers: Peers,
        engine: Engine,
        ema: Ema | None,
        family: Family,
        objective: ObjectiveSpec,
        last: int,
    ) -> None:
        """`last`: the step after which training ends."""
        self._config, self._store, self._held, self._peers = config, store, held, peers
        self._engine, self._ema, self._family, self._objective = engine, ema, family, objective
        self._last, self._samples = last, int(held.counts.sum())

    def due(self, step: int) -> bool:
        """Whether it is to be measured after so many steps."""
        return step % self._config.every == 0 or step == self._last

    def measure(self) -> dict[str, Any]:
        """`validation_loss`, of the average `ema_validation_loss`, and both by t, as a row of the metrics has them."""
        found = self._losses("validation_loss")
        if self._ema is not None:
            with self._ema.in_place():
                found |= self._losses("ema_validation_loss")
        return found

    def _losses(self, name: str) -> dict[str, Any]:
        times = self._config.times
        with self._engine.evaluating():
            own = [[self._loss(batch, t) * count for t in times] for batch, count in self._batches()]
        rows = itertools.chain.from_iterable(self._peers.gather(own))
        means = [math.fsum(losses) / self._samples for losses in zip(*rows, strict=True)]
        by_t = {f"{t:g}": _known(mean) for t, mean in zip(times, means, strict=True)}
        return {name: _known(math.fsum(means) / len(means)), f"{name}_by_t": by_t}

    def _loss(self, batch: Batch, t: float) -> float:
        engine, dtype = self._engine, compute_dtype(self._engine.strategy)
        predict = functools.partial(predict_by, engine, self._family, batch)
        tokens = self._family.tokens(engine.model, batch.latents.shape)
        return float(objectives.loss(self._objective, predict, batch.latents, batch.seeds, dtype, tokens, t))

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        """This process's micro-batches on the device, and how many samples of each count.

        All processes have as many, since those of a sharded model run forward together: where samples do not do for
        all, some have one that does not count.
        """
        engine, world = self._engine, self._peers.world
        buckets, micro = list(self._store.buckets), engine.strategy.micro_batch_size
        reader = BatchReader(self._store, micro, 0.0, pinned=False)
        for held in self._held.chosen:
            for first in range(0, len(held.rows), micro * world.world_size):
                start = first + world.rank * micro
                count = min(micro, max(len(held.rows) - start, 0))
                mine = slice(start, start + count) if count else slice(1)
                batch = reader.read(buckets[held.bucket], held.parts[mine], held.rows[mine], held.seeds[mine])
                yield batch.to(engine.device, compute_dtype(engine.strategy)), count


def _known(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
