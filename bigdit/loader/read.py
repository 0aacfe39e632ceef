"""One micro-batch: samples of a bucket, read at their places in the parts straight into the tensors of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from bigdit.catalog.classes import CLASS_LABEL
from bigdit.catalog.encoders import POOLED_TEXT
from bigdit.loader.batch import Batch
from bigdit.loader.buffers import Buffers
from bigdit.loader.order import Ints
from bigdit.store import FeatureStore
from bigdit.store.digest import bytes_of
from bigdit.store.part import Shape
from bigdit.store.reader import Part


def draw(seed: int, purpose: bytes) -> float:
    """A number in [0, 1) from a sample's seed, another one for each purpose."""
    return float(xxhash.xxh3_64_intdigest(purpose, seed) / 2**64)


class BatchReader:
    """Reads batches of a store, at most `micro_batch_size` samples each; threads may share it.

    Everything random of a sample comes from its seed: whether its caption or class is dropped, which of several
    captions it gets, and, where mean and deviation are stored, the noise of its latents.
    """

    def __init__(
        self,
        store: FeatureStore,
        micro_batch_size: int,
        caption_dropout: float,
        *,
        pinned: bool,
        no_class: int | None = None,
    ) -> None:
        """`no_class`: the label of a sample whose class is dropped, which the model says."""
        self._store = store
        self._dropout = caption_dropout
        self._no_class = no_class
        self._text_shape = store.text_shape
        element = 4 if store.has_deviation else store.latents_dtype.itemsize
        sizes = {"latents": max(math.prod(shape) for shape in store.buckets) * element}
        if self._text_shape is not None:
            sizes["text_embeds"] = math.prod(self._text_shape) * 2
        self._buffers = Buffers({name: size * micro_batch_size for name, size in sizes.items()}, pinned=pinned)
        self._pinned = pinned

    def advise(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> None:
        """This batch will be read soon: the system may fetch it meanwhile."""
        for number, row, seed in zip(parts.tolist(), rows.tolist(), seeds, strict=True):
            part = self._store.part(number)
            unread = self._text_shape is None or self._drops(seed)
            part.advise(bucket, row, None if unread else _caption(part, bucket, row, seed))

    def read(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> Batch:
        """The batch of these rows. Raises UserError where what is read is not what was written."""
        latents = self._latents(bucket, parts, rows, seeds)
        if self._text_shape is None:
            labels = torch.tensor([self._label(bucket, *place) for place in zip(parts, rows, seeds, strict=True)])
            return Batch(latents, None, None, tuple(seeds), {CLASS_LABEL: self._held(labels)})
        text_embeds, text_mask, extras = self._text(self._text_shape, bucket, parts, rows, seeds)
        return Batch(latents, text_embeds, text_mask, tuple(seeds), extras)

    def _label(self, bucket: Shape, number: int, row: int, seed: int) -> int:
        """The class of a row, or that which stands for none."""
        if self._no_class is not None and self._drops(seed):
            return self._no_class
        return int(self._store.part(int(number)).labels[bucket][row])

    def _text(
        self, shape: tuple[int, int], bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """text_embeds, text_mask and the pooled vectors, where there are some."""
        null = self._store.null_text
        text_embeds, filled = self._buffers.take("text_embeds", (len(seeds), *shape), torch.bfloat16)
        memory, width, row_bytes = bytes_of(text_embeds), 2 * shape[1], 2 * math.prod(shape)
        lengths, pooled = [0] * len(seeds), [null.pooled] * len(seeds)
        for place in np.lexsort((rows, parts)).tolist():
            seed, start = seeds[place], place * row_bytes
            if self._drops(seed):
                nbytes = null.states.nbytes
                memory[start : start + nbytes] = bytes_of(null.states)
            else:
                part = self._store.part(int(parts[place]))
                caption = _caption(part, bucket, int(rows[place]), seed)
                nbytes = part.tokens(caption) * width
                part.check_fits(caption, shape)
                if part.is_plain:
                    part.read_states(caption, memory[start : start + nbytes])
                else:
                    pooled[place] = part.read_text(caption, text_embeds[place, : nbytes // width])
            if nbytes < filled[place]:
                text_embeds.view(-1).view(torch.uint8)[start + nbytes : start + filled[place]].zero_()
            filled[place] = nbytes
            lengths[place] = nbytes // width
        text_mask = (torch.arange(shape[0]) < torch.tensor(lengths)[:, None]).to(torch.bfloat16)
        vectors = [each for each in pooled if each is not None]
        extras = {POOLED_TEXT: self._held(torch.stack(vectors).to(torch.bfloat16))} if vectors else {}
        return text_embeds, self._held(text_mask), extras

    def _latents(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> torch.Tensor:
        """[B, *bucket] as stored, or drawn in fp32 from mean and deviation."""
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

    def _drops(self, seed: int) -> bool:
        return draw(seed, b"dropout") < self._dropout

    def _held(self, values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory() if self._pinned else values


def _caption(part: Part, bucket: Shape, row: int, seed: int) -> int:
    return part.choose_caption(bucket, row, draw(seed, b"caption"))
