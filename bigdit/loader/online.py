"""Online features: a run's images and captions with the interface of a store, and its encoders where it trains."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bigdit.catalog.families import CLASS_LABEL, LOSS_MASK, class_count, takes_classes
from bigdit.config.plan_file import PlanFile
from bigdit.config.run import RunConfig
from bigdit.encoders.fit import encoder_misfits, plan_misfits
from bigdit.encoders.latents import Color, bucket_pixels, mask_latents
from bigdit.encoders.load import load_image_codec, load_text_encoder
from bigdit.encoders.protocol import EncodedBatch, TextEncoder, shapes_of, to_unit_range
from bigdit.errors import UserError
from bigdit.loader.batch import CaptionedBatch, Captions
from bigdit.loader.buffers import padded
from bigdit.loader.order import Ints, draw
from bigdit.sources.open import SourceList, open_source
from bigdit.sources.protocol import Caption, Item, Sample, Unusable
from bigdit.store.part import Shape
from bigdit.store.schema import Classes, StoreSchema
from bigdit.store.store import Index
from bigdit.store.text import Cut, Text, chosen, summed
from bigdit.strategy import ModelSpec
from bigdit.units import gib, how_many

_ROUNDED = 1.01
"""The encoders may differ so much from the plan's bytes, which are those of an allocator that rounds."""


@dataclass(frozen=True)
class Loaded:
    """The sample `index` of the source, its pixels in the bucket (uint8), and the number of its class, if it has one.

    `skipped`: a message on the unusable sample that it replaces.
    """

    index: int
    sample: Sample
    pixels: npt.NDArray[np.uint8]
    label: int | None
    skipped: str | None


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
        self.buckets = {shape: len(source)}

    def item(self, number: int, row: int) -> Item:
        """The image of a part's row."""
        at = int(self.index.parts[number, 0]) + row
        return self._source.items(at, at + 1)[0]

    def load(self, number: int, row: int) -> Loaded:
        """The sample of a part's row, or the next usable one of its source. After the last comes the first.

        The choice depends only on the sources, so all processes agree. Raises UserError if no sample is usable.
        """
        at = int(self.index.parts[number, 0]) + row
        ends = self.schema.ends()
        source = bisect.bisect_right(ends, at)
        start, end = ends[source] - int(self.schema.sources[source]["count"]), ends[source]
        skipped: str | None = None
        for index in itertools.chain(range(at, end), range(start, at)):
            (item,) = self._source.items(index, index + 1)
            try:
                return self._loaded(item, skipped and f"data.images: {skipped}; {item.name} is taken instead")
            except Unusable as error:
                skipped = skipped or f"{item.name} is skipped: {error}"
        raise UserError(f"data.images: none of {how_many(end - start, 'image')} of a source can be used: {skipped}")

    def _loaded(self, item: Item, skipped: str | None) -> Loaded:
        """Raises Unusable."""
        sample, known = item.load(), self.schema.classes
        _, pixels = bucket_pixels(sample.image, [self._bucket], self._color, sample.fit)
        label = None if known is None else Classes(known).of(sample)
        return Loaded(item.index, sample, pixels, label, skipped)

    def name_of(self, bucket: Shape, number: int, row: int) -> str:
        """A sample in words."""
        item = self.item(number, row)
        return f"sample {item.index} ({item.name})"


class RawReader:
    """Reads batches of a RawStore, as BatchReader reads those of a store. The same seeds choose the same captions, and
    drop the same captions and classes. Threads may share it."""

    def __init__(self, store: RawStore, caption_dropout: float, *, pinned: bool, no_class: int | None = None) -> None:
        self._store, self._dropout, self._pinned, self._no_class = store, caption_dropout, pinned, no_class

    def advise(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> None:
        """Images are not prefetched."""

    def read(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> CaptionedBatch:
        """The batch of these rows, with others in place of unusable ones. Raises UserError as RawStore.load."""
        loaded = [self._store.load(*place) for place in zip(parts.tolist(), rows.tolist(), strict=True)]
        pixels = torch.from_numpy(np.stack([each.pixels for each in loaded]))  # Pillow owns pixels of gray images
        labelled = self._store.schema.classes is not None
        captions = (
            ()
            if labelled
            else [self._caption(each.sample.captions, seed) for each, seed in zip(loaded, seeds, strict=True)]
        )
        extras = {}
        if labelled:
            extras[CLASS_LABEL] = self._held(torch.tensor([*map(self._label, loaded, seeds)]))
        if self._store.schema.has_masks:
            (pixels_of,), (shape,) = self._store.schema.buckets, self._store.buckets
            masks = [mask_latents(each.sample, pixels_of, shape) for each in loaded]
            extras[LOSS_MASK] = self._held(torch.stack(masks))
        indices = tuple(each.index for each in loaded)
        skipped = tuple(each.skipped for each in loaded)
        return CaptionedBatch(self._held(pixels), captions, indices, tuple(seeds), extras, skipped)

    def lengths(self, bucket: Shape, parts: Ints, rows: Ints, seeds: Sequence[int]) -> Ints:
        """Bytes of these samples' captions, which are known before their tokens. 0 if none is read."""
        return np.array([self._bytes(*each) for each in zip(parts.tolist(), rows.tolist(), seeds, strict=True)])

    def _bytes(self, number: int, row: int, seed: int) -> int:
        try:
            caption = self._caption(self._store.item(number, row).captions(), seed)
        except Unusable:
            return 0
        return 0 if caption is None else len(caption.encode())

    def _caption(self, captions: Sequence[Caption], seed: int) -> str | None:
        if self._drops(seed):
            return None
        weights = np.array([each.weight for each in captions], np.float32)  # the dtype of a store
        return captions[chosen(weights, draw(seed, b"caption"))].text

    def _label(self, loaded: Loaded, seed: int) -> int | None:
        return self._no_class if self._no_class is not None and self._drops(seed) else loaded.label

    def _drops(self, seed: int) -> bool:
        return draw(seed, b"dropout") < self._dropout

    def _held(self, values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory() if self._pinned else values


class RunEncoders:
    """The encoders of `bigdit extract`, for at most `chunk` samples at once. On a CPU, features are the same bits."""

    def __init__(self, run: RunConfig, device: torch.device, chunk: int, source: SourceList) -> None:
        """Raises UserError if the encoders cannot be loaded."""
        config, self._device, self._source = run.encoders, device, source
        self.captions, self.cuts = 0, list[Cut]()
        self.image = load_image_codec(config.image, device, chunk)
        # One by one on a CPU, as in extraction, since matrix products of other shapes round differently.
        captions = 1 if device.type == "cpu" else chunk
        self.text = None if config.text is None else load_text_encoder(config.text, device, captions)
        # It replaces dropped captions. It is in CPU memory as in a store, and is copied to the device when needed.
        self._null = None if self.text is None else self.text.null().to("cpu", torch.bfloat16)
        self.trained: dict[str, nn.Module] = self._train_clips() if run.strategy.trains_text else {}

    def _train_clips(self) -> dict[str, nn.Module]:
        """Let texts have gradients. Returns the CLIP encoders, by name. Raises UserError if there are none."""
        from bigdit.encoders.pipeline import PipelineTextEncoder  # diffusers takes seconds to import

        found = self.text.clips() if isinstance(self.text, PipelineTextEncoder) else {}
        if not isinstance(self.text, PipelineTextEncoder) or not found:
            raise UserError(
                "strategy.lora.text_encoders is true, and encoders.text.pipeline holds no CLIP text encoder; leave it "
                "out, or name the whole pipeline's folder"
            )
        self.text.trained = True
        for module in self.text.modules():
            module.requires_grad_(False)
        return found

    def tensors(self) -> list[torch.Tensor]:
        """All weights and buffers."""
        modules = [*self.image.modules(), *(self.text.modules() if self.text else ())]
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    def encode(self, pixels: torch.Tensor, captions: Captions, indices: Sequence[int]) -> EncodedBatch:
        """Encode pixels [B, 1 or 3, (F,) H, W] uint8, and captions if the model has text.

        The results are rounded as in a store, unless text encoders are trained.
        """
        with torch.no_grad():
            latents = self.image.encode(to_unit_range(pixels), indices).to(self.image.stored_dtype).float()
        if self.text is None or self._null is None:
            return EncodedBatch(latents, None, None, {})
        most = {name: tokens for name, (tokens, _) in shapes_of(self.text).items()}
        if self.trained:  # a dropped caption is the empty one, which the encoders now encode differently
            filled = ["" if caption is None else caption for caption in captions]
            return EncodedBatch(latents, *padded(self._encode_captions(filled, indices, self.text), most))
        with torch.no_grad():
            encoded = iter(self._encode_captions(captions, indices, self.text))
            texts = [
                (self._null if caption is None else next(encoded)).to(self._device, torch.bfloat16)
                for caption in captions
            ]
            return EncodedBatch(latents, *padded(texts, most))

    def _encode_captions(self, captions: Captions, indices: Sequence[int], encoder: TextEncoder) -> list[Text]:
        """The texts of captions that are not dropped. Counts them in `captions`, and their cuts in `cuts`."""
        kept = [(index, caption) for index, caption in zip(indices, captions, strict=True) if caption is not None]
        texts = encoder.encode([caption for _, caption in kept])
        self.captions += len(texts)
        for (index, _), text in zip(kept, texts, strict=True):
            if text.cuts:
                (item,) = self._source.items(index, index + 1)
                self.cuts = summed([*self.cuts, *(replace(cut, samples=[item.name]) for cut in text.cuts)])
        return texts


def more_than_planned(plan: PlanFile, encoders: RunEncoders) -> list[str]:
    """A note if the encoders take more memory than planned."""
    planned, found = plan.encoder_bytes, sum(tensor.nbytes for tensor in encoders.tensors())
    if found <= planned * _ROUNDED:
        return []
    return [
        f"the encoders take {gib(found)}, and the plan has {gib(planned)} for them; compare encoders.image.dtype and "
        "encoders.text.dtype with the plan"
    ]


def open_online(
    run: RunConfig, spec: ModelSpec, plan: PlanFile | None, device: torch.device, chunk: int
) -> tuple[RawStore, RunEncoders]:
    """The run's images, and its encoders on the device.

    Raises UserError if encoders cannot be loaded, or their features do not fit the model or the plan.
    """
    source = open_source(run.data)
    classes = (source.class_names or class_count(spec)) if takes_classes(spec) else None
    encoders = RunEncoders(run, device, chunk, source)
    image, text = encoders.image, encoders.text
    (bucket,) = run.data.all_buckets
    shape, tokens = image.latent_shape(bucket), 0 if text is None else text.max_tokens
    problems = encoder_misfits(run, spec, image, text, classes)
    if plan is not None:
        problems += [f"strategy.features is online: {each}" for each in plan_misfits(plan, [shape], tokens)]
    if problems:
        raise UserError(*problems)
    schema = StoreSchema(
        codec={},
        text_encoder={},
        buckets=[bucket],
        sources=source.identity["sources"],
        part_size=run.data.part_size,
        classes=classes,
        fps=run.data.fps,
    )
    text_shape = None if text is None else (tokens, text.dim)
    return RawStore(source, schema, shape, image.color, image.stored_dtype, text_shape), encoders
