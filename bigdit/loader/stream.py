"""The micro-batches of this process. They are read ahead of the step, straight into the tensors of the batch."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from bigdit.catalog.encoders import POOLED_TEXT
from bigdit.catalog.families import CLASS_LABEL, IMAGE_CONDITION, IMAGE_EMBEDS, LOSS_MASK, mask_of
from bigdit.config.data import FirstFrameNoise
from bigdit.dist import World
from bigdit.loader.batch import Batch, CaptionedBatch, read_ahead
from bigdit.loader.buffers import Buffers, Padded, mark_first
from bigdit.loader.online import RawReader, RawStore
from bigdit.loader.order import Ints, Order, dealt, draw, sample_seed
from bigdit.loader.stages import source_of_part
from bigdit.store import FeatureStore
from bigdit.store.part import FIRST_FRAME, Shape
from bigdit.store.tensors import bytes_of
from bigdit.store.text import TEXT

ADVISED_AHEAD = 8
"""Micro-batches that the kernel prefetches, to keep the disk's queue full. They take memory only in the page cache."""


Micro = Batch | CaptionedBatch
"""A micro-batch: features, or images and captions."""


@dataclass(frozen=True)
class FirstFrameChanges:
    """The `first_frame_dropout` and `first_frame_noise` of DataConfig."""

    dropout: float = 0.0
    noise: FirstFrameNoise | None = None

    def change(self, condition: torch.Tensor, embeds: torch.Tensor | None, mask: int, seeds: Sequence[int]) -> None:
        """Replace first frames by zeros, or add noise, in place. `condition` [B, mask + C, f, h, w]."""
        for place, seed in enumerate(seeds):
            if draw(seed, b"first frame") < self.dropout:
                condition[place].zero_()
                if embeds is not None:
                    embeds[place].zero_()
            elif self.noise is not None:
                generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(b"first frame noise", seed) >> 1)
                frame = condition[place, mask:, 0]
                sigma = (self.noise.mean + self.noise.std * torch.randn((), generator=generator)).exp()
                frame.copy_(frame + sigma * torch.randn(frame.shape, generator=generator))


class FeatureStream:
    """Micro-batches of a store, or of images that are not encoded yet, for one process of `world`.

    All processes share one order. `by_text`: the work of a step depends on the lengths of captions, so each process
    gets captions of similar lengths.
    """

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
        first_frames: FirstFrameChanges | None = None,
        no_class: int | None = None,
        loss_weights: Sequence[float] = (),
        by_text: bool = False,
        read_ahead_steps: int = 2,
        threads: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """`loss_weights`: the factor of the loss for the samples of each source; 1 for further sources."""
        self.order = order
        self._world = world
        self._sizes = grad_accum_steps, world.world_size, micro_batch_size
        self._seed = seed
        self._by_text = by_text
        self._read_ahead_steps = read_ahead_steps
        self._threads, self._pinned = threads, pin_memory
        self._buckets = list(store.buckets)
        self._weights: npt.NDArray[np.float32] | None = None
        if any(weight != 1 for weight in loss_weights):
            sources = source_of_part(store)
            weights = np.ones(max(int(sources.max()) + 1, len(loss_weights)), np.float32)
            weights[: len(loss_weights)] = loss_weights
            self._weights = weights[sources]
        self._reader: BatchReader | RawReader = (
            RawReader(store, caption_dropout, pinned=pin_memory, no_class=no_class)
            if isinstance(store, RawStore)
            else BatchReader(
                store,
                micro_batch_size,
                caption_dropout,
                pinned=pin_memory,
                no_class=no_class,
                first_frames=first_frames,
            )
        )
        self._places = functools.lru_cache(2 * ADVISED_AHEAD)(self._find_places)  # advised first, and read later
        self._lock = threading.Lock()
        self._advised = 0  # the first step that is not prefetched yet

    def steps(self, start: int, stop: int) -> Generator[list[Micro]]:
        """The micro-batches of steps [start, stop). Threads read `read_ahead_steps` of them ahead, a step each."""
        readers = ThreadPoolExecutor(self._threads, thread_name_prefix="loader")
        try:
            yield from read_ahead(
                lambda step: self._fetch(step, stop), range(start, stop), self._read_ahead_steps, readers
            )
        finally:
            readers.shutdown(cancel_futures=True)

    def micro_batches(self, step: int) -> list[Micro]:
        """The grad_accum_steps micro-batches of this process in this step."""
        samples = self.samples(step)
        found: list[Micro] = [self._reader.read(*each) for each in samples]
        weights = [None if self._weights is None else self._weights[parts] for _, parts, *_ in samples]
        if math.prod(self._sizes) > self.order.global_batch_size:
            counted = self._places(step) < self.order.global_batch_size
            weights = [
                np.where(first, 1 if own is None else own, 0).astype(np.float32)
                for own, first in zip(weights, counted, strict=True)
            ]
            found = [_without_repeats(*each) for each in zip(found, counted.tolist(), strict=True)]
        return [
            batch if own is None or (own == 1).all() else self._weighted(batch, own, bucket)
            for batch, own, (bucket, *_) in zip(found, weights, samples, strict=True)
        ]

    def _weighted(self, batch: Micro, weights: npt.NDArray[np.float32], bucket: Shape) -> Micro:
        """The batch with a factor of each sample's loss in its mask."""
        mask = batch.extras.get(LOSS_MASK, torch.ones(len(weights), *bucket[-2:], dtype=torch.bfloat16))
        mask = (mask * torch.from_numpy(weights)[:, None, None]).to(torch.bfloat16)
        return replace(batch, extras={**batch.extras, LOSS_MASK: mask.pin_memory() if self._pinned else mask})

    def _fetch(self, step: int, stop: int) -> list[Micro]:
        """Read the micro-batches of a step, and prefetch the next ones."""
        last = min(step + 1 + -(-ADVISED_AHEAD // self._sizes[0]), stop)
        with self._lock:
            first, self._advised = max(self._advised, step + 1), max(self._advised, last)
        for ahead in range(first, last):
            for each in self.samples(ahead):
                self._reader.advise(*each)
        return self.micro_batches(step)

    def samples(self, step: int) -> list[tuple[Shape, Ints, Ints, tuple[int, ...]]]:
        """Bucket, parts, rows and seeds of each micro-batch of this process in this step."""
        batch = self.order.batch(step)
        bucket, seeds = self._buckets[batch.bucket], functools.partial(sample_seed, self._seed, step)
        return [
            (bucket, batch.parts[mine], batch.rows[mine], tuple(map(seeds, mine.tolist())))
            for mine in self._places(step) % len(batch.rows)
        ]

    def _find_places(self, step: int) -> Ints:
        """The places [passes, micro-batch] of this process. Places beyond the global batch repeat its first samples."""
        passes, processes, micro = self._sizes
        count, size = math.prod(self._sizes), self.order.global_batch_size
        places = np.arange(count).reshape(self._sizes)
        if count > size:  # so that all processes repeat about equally many
            places = np.arange(count).reshape(passes, micro, processes).swapaxes(1, 2)
        if self._by_text and processes > 1:
            batch, of = self.order.batch(step), np.arange(count) % size
            every = [sample_seed(self._seed, step, place) for place in of.tolist()]
            lengths = self._reader.lengths(self._buckets[batch.bucket], batch.parts[of], batch.rows[of], every)
            places = dealt(lengths, passes, processes)
        mine: Ints = places[:, self._world.rank]
        return mine


def _without_repeats(batch: Micro, counted: Sequence[bool]) -> Micro:
    """The batch without messages on samples that are only repeated."""
    if not isinstance(batch, CaptionedBatch):
        return batch
    messages = zip(batch.skipped, counted, strict=True)
    return replace(batch, skipped=tuple(message if first else None for message, first in messages))


class BatchReader:
    """Reads batches of a store, of at most `micro_batch_size` samples. Threads may share it.

    The seed of a sample decides whether its caption or class is dropped, and which of several captions is chosen. If
    mean and deviation are stored, it also decides the noise of the latents.
    """

    def __init__(
        self,
        store: FeatureStore,
        micro_batch_size: int,
        caption_dropout: float,
        *,
        pinned: bool,
        no_class: int | None = None,
        first_frames: FirstFrameChanges | None = None,
    ) -> None:
        """`no_class`: the model's label for a dropped class. `first_frames`: None leaves them as stored."""
        self._store = store
        self._dropout = caption_dropout
        self._no_class = no_class
        self._changes = first_frames
        self._shapes = store.text_shapes
        element = 4 if store.has_deviation else store.latents_dtype.itemsize
        sizes = {"latents": max(math.prod(shape) for shape in store.buckets) * element}
        sizes |= {name: math.prod(shape) * 2 for name, shape in self._shapes.items()}
        frame = store.schema.first_frame
        self._mask = 0 if frame is None else int(frame["mask"])
        for name, shape in (each for bucket in store.buckets for each in self._frame_shapes(bucket).items()):
            sizes[name] = max(sizes.get(name, 0), math.prod(shape) * 2)
        self._buffers = Buffers({name: size * micro_batch_size for name, size in sizes.items()}, pinned=pinned)
        self._pinned = pinned

    def lengths(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> Ints:
        """How many states the masks of these samples' texts show."""
        null = self._store.null_text.shown
        captions = [
            (self._store.part(number), self._chosen(number, bucket, row, seed))
            for number, row, seed in zip(parts.tolist(), rows.tolist(), seeds, strict=True)
        ]
        return np.array([null if caption is None else part.shown(caption) for part, caption in captions])

    def advise(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> None:
        """Prefetch this batch."""
        for number, row, seed in zip(parts.tolist(), rows.tolist(), seeds, strict=True):
            caption = self._chosen(number, bucket, row, seed) if self._shapes else None
            self._store.part(number).advise(bucket, row, caption)

    def read(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> Batch:
        """The batch of these rows. Raises UserError if they are damaged."""
        latents = self._latents(bucket, parts, rows, seeds)
        if not self._shapes:
            labels = torch.tensor([self._label(bucket, *place) for place in zip(parts, rows, seeds, strict=True)])
            extras = {CLASS_LABEL: self._held(labels)} | self._frames(bucket, parts, rows, seeds)
            return Batch(latents, None, None, tuple(seeds), extras)
        text_embeds, text_mask, extras = self._text(bucket, parts, rows, seeds)
        extras |= self._frames(bucket, parts, rows, seeds)
        return Batch(latents, text_embeds, text_mask, tuple(seeds), extras)

    def _label(self, bucket: Shape, number: int, row: int, seed: int) -> int:
        """The class of a row, or the label for a dropped class."""
        if self._no_class is not None and self._drops(seed):
            return self._no_class
        return int(self._store.part(int(number)).labels[bucket][row])

    def _text(
        self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """text_embeds, text_mask, and as extras the pooled vectors and each stream with its mask, if any."""
        null, count = self._store.null_text, len(seeds)
        texts = {name: Padded(self._buffers, name, count, shape) for name, shape in self._shapes.items()}
        pooled = [null.pooled] * count
        for place in np.lexsort((rows, parts)).tolist():
            caption = self._chosen(int(parts[place]), bucket, int(rows[place]), seeds[place])
            if caption is None:
                for name, dropped in null.sequences.items():
                    memory = texts[name].room(place, len(dropped.states), dropped.shown)
                    memory[:] = bytes_of(dropped.states)
                continue
            part = self._store.part(int(parts[place]))
            part.check_fits(caption, self._shapes)
            memories = {
                name: text.room(place, part.tokens(caption, name), part.shown(caption, name))
                for name, text in texts.items()
            }
            pooled[place] = part.read_text(caption, memories)
        vectors = [each for each in pooled if each is not None]
        extras = {POOLED_TEXT: self._held(torch.stack(vectors).to(torch.bfloat16))} if vectors else {}
        own = texts.pop(TEXT)
        for name, text in texts.items():
            extras |= {name: text.states, mask_of(name): self._held(text.mask())}
        return own.states, self._held(own.mask()), extras

    def _frame_shapes(self, bucket: Shape) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of a sample's first-frame tensors, references and mask of the loss. The mask of the first
        frame is part of the condition."""
        kept = dict(self._store.frame_shapes(bucket))
        if FIRST_FRAME not in kept:
            return kept
        channels, *sides = kept.pop(FIRST_FRAME)
        return {IMAGE_CONDITION: (self._mask + channels, *sides), **kept}

    def _frames(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> dict[str, torch.Tensor]:
        """Condition and embeddings for image-to-video models, references for edit models, and masks of the loss, all in
        bf16."""
        shapes, count = self._frame_shapes(bucket), len(rows)
        found = {name: self._buffers.take(name, (count, *shape), torch.bfloat16)[0] for name, shape in shapes.items()}
        if not found:
            return {}
        if LOSS_MASK in found:
            found[LOSS_MASK].fill_(1)  # for parts without masks
        stored = dict(found)
        if (condition := stored.pop(IMAGE_CONDITION, None)) is not None:
            stored[FIRST_FRAME] = mark_first(condition, self._mask)[:, self._mask :]
        for place in np.lexsort((rows, parts)).tolist():
            part = self._store.part(int(parts[place]))
            if part.frame_shapes(bucket):
                memories = {name: bytes_of(each[place]) for name, each in stored.items()}
                part.read_frame(bucket, int(rows[place]), memories)
        if self._changes is not None and condition is not None:
            self._changes.change(condition, found.get(IMAGE_EMBEDS), self._mask, seeds)
        return found

    def _latents(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> torch.Tensor:
        """Latents [B, *bucket] as stored, or sampled in fp32 from mean and deviation."""
        store = self._store
        dtype = torch.float32 if store.has_deviation else store.latents_dtype
        latents, _ = self._buffers.take("latents", (len(seeds), *bucket), dtype)
        stored = torch.empty((2, *bucket), dtype=store.latents_dtype) if store.has_deviation else latents[0]
        memory, nbytes = bytes_of(stored if store.has_deviation else latents), stored.nbytes
        for place in np.lexsort((rows, parts)).tolist():
            part, row = store.part(int(parts[place])), int(rows[place])
            if not store.has_deviation:
                part.read_latents(bucket, row, memory[place * nbytes : (place + 1) * nbytes])
                continue
            part.read_latents(bucket, row, memory)
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(b"latents", seeds[place]) >> 1)
            mean, deviation = stored.float()
            latents[place].normal_(generator=generator).mul_(deviation).add_(mean)
        return latents

    def _chosen(self, number: int, bucket: Shape, row: int, seed: int) -> int | None:
        """The number of a sample's caption in its part; None for the null text."""
        part = self._store.part(number)
        if not self._drops(seed):
            return part.choose_caption(bucket, row, draw(seed, b"caption"))
        return part.last_caption(bucket, row) if self._store.schema.editor.seen else None

    def _drops(self, seed: int) -> bool:
        return draw(seed, b"dropout") < self._dropout

    def _held(self, values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory() if self._pinned else values
