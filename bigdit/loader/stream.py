"""This process's micro-batches, read from the store ahead of the step."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from bigdit.dist import World
from bigdit.features import FeatureStore
from bigdit.loader.ahead import Held, read_ahead
from bigdit.loader.batch import Batch
from bigdit.loader.order import Order, sample_seed


class FeatureStream:
    """Micro-batches of a store for one process of `world`; every process sees its share of the same order."""

    def __init__(
        self,
        store: FeatureStore,
        world: World,
        *,
        micro_batch_size: int,
        grad_accum_steps: int,
        seed: int,
        caption_dropout: float,
        read_ahead_steps: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self._store = store
        self._world = world
        self._micro_batch_size = micro_batch_size
        self._grad_accum_steps = grad_accum_steps
        self._seed = seed
        self._caption_dropout = caption_dropout
        self._read_ahead_steps = read_ahead_steps
        self._pin_memory = pin_memory
        self._buckets = sorted(store.buckets)
        global_batch_size = micro_batch_size * grad_accum_steps * world.world_size
        self.order = Order([len(store.buckets[bucket]) for bucket in self._buckets], global_batch_size, seed)

    def steps(self, start: int, stop: int, held: Held[list[Batch]] = lambda futures: None) -> Generator[list[Batch]]:
        """The micro-batches of steps [start, stop), `read_ahead_steps` of them read ahead by one thread; `held` is
        told of all that exist before each is handed out."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as reader:
            yield from read_ahead(self.micro_batches, range(start, stop), self._read_ahead_steps, reader, held)

    def micro_batches(self, step: int) -> list[Batch]:
        """The grad_accum_steps micro-batches of this process in this step."""
        batch = self.order.batch(step)
        micro, size = self._micro_batch_size, self._world.world_size
        starts = ((i * size + self._world.rank) * micro for i in range(self._grad_accum_steps))
        return [self._read(step, batch.bucket, batch.positions, start) for start in starts]

    def _read(self, step: int, bucket: int, positions: npt.NDArray[np.int64], start: int) -> Batch:
        places = range(start, start + self._micro_batch_size)
        seeds = tuple(sample_seed(self._seed, step, place) for place in places)
        latents, texts, _ = self._store.read(self._buckets[bucket], [int(positions[place]) for place in places])
        # A seed's first draw decides on dropout; noise and t come from the same seed by other generators.
        texts = [
            self._store.null_text if random.Random(f"dropout/{seed}").random() < self._caption_dropout else text.states
            for seed, text in zip(seeds, texts, strict=True)
        ]
        text_embeds, text_mask = pad_text(texts, self._store.max_tokens)
        batch = Batch(latents.float(), text_embeds, text_mask, seeds)
        return batch.pin_memory() if self._pin_memory else batch


def pad_text(texts: Sequence[torch.Tensor], max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts [len_i, D] as text_embeds [B, max_tokens, D], zero beyond len_i, and text_mask [B, max_tokens]."""
    text_embeds = texts[0].new_zeros(len(texts), max_tokens, texts[0].shape[1])
    text_mask = texts[0].new_zeros(len(texts), max_tokens)
    for row, mask, text in zip(text_embeds, text_mask, texts, strict=True):
        row[: len(text)] = text
        mask[: len(text)] = 1
    return text_embeds, text_mask
