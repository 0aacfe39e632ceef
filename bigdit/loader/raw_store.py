"""Images and captions of a run's sources with the interface of a store, for online features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from bigdit.catalog.conditions import CLASS_LABEL, LOSS_MASK
from bigdit.encoders.latents import Color, bucket_pixels, mask_latents
from bigdit.errors import UserError
from bigdit.loader.batch import CaptionedBatch
from bigdit.loader.order import Ints, draw
from bigdit.sources.open import SourceList
from bigdit.sources.protocol import Item, Sample, Unusable
from bigdit.store.part import Shape
from bigdit.store.schema import Classes, StoreSchema
from bigdit.store.store import BucketRows, Index
from bigdit.store.text import chosen


class RawStore:
    """All images of `source` in one bucket, whose latents have `shape`.

    Parts and rows are those of a store without skipped images, so the order of training is the same.
    """

    root = "data.images"
    has_deviation = False

    def __init__(
        self,
        source: SourceList,
        schema: StoreSchema,
        shape: Shape,
        color: Color,
        latents_dtype: torch.dtype,
        text_shape: tuple[int, int] | None,
    ) -> None:
        """`schema`: the sources, the only bucket in pixels, and the classes, without encoders."""
        self.schema, self.latents_dtype, self.text_shape = schema, latents_dtype, text_shape
        self._source, self._color = source, color
        (self._bucket,) = schema.buckets
        parts = np.array([(start, end, 0) for start, end in schema.ranges()], np.int64)
        self.index = Index((shape,), parts, parts[:, 1:2] - parts[:, :1])
        self.counts = self.index.counts
        self.buckets = {shape: BucketRows(self.counts[:, 0])}

    def item(self, number: int, row: int) -> Item:
        """The image of a part's row."""
        at = int(self.index.parts[number, 0]) + row
        return self._source.items(at, at + 1)[0]

    def load(self, item: Item) -> tuple[Sample, npt.NDArray[np.uint8]]:
        """An item's sample, and its pixels in the bucket, uint8. Raises UserError for an unusable item."""
        try:
            sample = item.load()
            _, pixels = bucket_pixels(sample.image, [self._bucket], self._color, sample.fit)
        except Unusable as error:
            raise self._unusable(item, error) from None
        return sample, pixels

    def label(self, item: Item, sample: Sample) -> int:
        """The number of a sample's class. Raises UserError if it is no class of the run."""
        assert self.schema.classes is not None
        assert sample.label is not None
        try:
            return Classes(self.schema.classes).number(sample.label)
        except UserError as error:
            raise self._unusable(item, error) from None

    def name_of(self, bucket: Shape, number: int, row: int) -> str:
        """The name of a sample for people."""
        item = self.item(number, row)
        return f"sample {item.index} ({item.name})"

    def _unusable(self, item: Item, why: Exception) -> UserError:
        return UserError(
            f"data.images: {item.name}: {why}; fix or replace it, and the same command resumes. A run that has not "
            "begun can leave it out, or set strategy.features to cached: `bigdit extract` skips it"
        )


class RawReader:
    """Reads batches of a RawStore, as BatchReader does of a store. The same seeds give the same captions, classes and
    drops. Threads may share it."""

    def __init__(self, store: RawStore, caption_dropout: float, *, pinned: bool, no_class: int | None = None) -> None:
        self._store, self._dropout, self._pinned, self._no_class = store, caption_dropout, pinned, no_class

    def advise(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> None:
        """Images are not prefetched."""

    def read(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> CaptionedBatch:
        """The batch of these rows. Raises UserError for an unusable image."""
        items = [self._store.item(*place) for place in zip(parts.tolist(), rows.tolist(), strict=True)]
        loaded = [self._store.load(item) for item in items]
        pixels = torch.from_numpy(np.stack([each for _, each in loaded]))  # a copy: Pillow owns pixels of gray images
        labelled = self._store.schema.classes is not None
        captions = () if labelled else [self._caption(*each) for each in zip(loaded, seeds, strict=True)]
        extras = {}
        if labelled:
            labels = [self._label(*each) for each in zip(items, loaded, seeds, strict=True)]
            extras[CLASS_LABEL] = self._held(torch.tensor(labels))
        if self._store.schema.has_masks:
            (pixels_of,), (shape,) = self._store.schema.buckets, self._store.buckets
            masks = [mask_latents(sample, pixels_of, shape) for sample, _ in loaded]
            extras[LOSS_MASK] = self._held(torch.stack(masks))
        indices = tuple(item.index for item in items)
        return CaptionedBatch(self._held(pixels), captions, indices, tuple(seeds), extras)

    def _caption(self, loaded: tuple[Sample, npt.NDArray[np.uint8]], seed: int) -> str | None:
        sample, _ = loaded
        if self._drops(seed):
            return None
        weights = np.array([each.weight for each in sample.captions], np.float32)  # the dtype of a store
        return sample.captions[chosen(weights, draw(seed, b"caption"))].text

    def _label(self, item: Item, loaded: tuple[Sample, npt.NDArray[np.uint8]], seed: int) -> int:
        sample, _ = loaded
        dropped = self._no_class is not None and self._drops(seed)
        return self._no_class if dropped and self._no_class is not None else self._store.label(item, sample)

    def _drops(self, seed: int) -> bool:
        return draw(seed, b"dropout") < self._dropout

    def _held(self, values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory() if self._pinned else values
