"""One unit of work: a range of the source through the encoders into the features of one part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from bigdit.config.data import frames_of
from bigdit.encoders.buckets import bucket_pixels
from bigdit.encoders.codecs import ImageCodec, to_unit_range
from bigdit.encoders.first_frame import FirstFrames
from bigdit.encoders.text_encoder import TextEncoder
from bigdit.encoders.turns import Turn, at_once
from bigdit.errors import UserError
from bigdit.extract.speed import Stopwatch
from bigdit.sources.protocol import Caption, Item, Sample, Unusable
from bigdit.store.classes import Classes
from bigdit.store.part import Encoded, Shape, Skipped
from bigdit.store.text import Cut, Text, summed

OnPictures = Callable[[int, int], None]
"""Called with the pictures that were encoded or skipped since, and those of them that were skipped."""


def encode_unit(
    items: Sequence[Item],
    buckets: Sequence[tuple[int, ...]],
    codec: ImageCodec,
    condition: TextEncoder | Classes,
    on_progress: OnPictures,
    watch: Stopwatch | None = None,
    first: FirstFrames | None = None,
    turn: Turn = at_once,
) -> Encoded:
    """Features of `items`, those that cannot be used left out: latents, and their captions encoded, or their classes;
    with `first`, what it keeps of first frames. All pictures come before the captions, in the `turn` of their encoders.

    `on_progress` is told of pictures, and `watch` of the seconds that went into `reading` and `encoding`.
    """
    unit = _Unit(buckets, codec, condition, on_progress, watch or Stopwatch(), first, turn)
    for item in items:
        unit.take(item)
    return unit.encoded()


class _Unit:
    """Pictures that wait for others of their bucket, and what has become of those before them."""

    def __init__(
        self,
        buckets: Sequence[tuple[int, ...]],
        codec: ImageCodec,
        condition: TextEncoder | Classes,
        on_progress: OnPictures,
        watch: Stopwatch,
        first: FirstFrames | None,
        turn: Turn,
    ) -> None:
        self._buckets, self._codec, self._condition = buckets, codec, condition
        self._on_progress, self._watch, self._first, self._turn = on_progress, watch, first, turn
        self._waiting: dict[tuple[int, ...], list[npt.NDArray[np.uint8]]] = defaultdict(list)
        self._latents: dict[Shape, list[torch.Tensor]] = defaultdict(list)
        self._frames: dict[Shape, list[dict[str, torch.Tensor]]] = defaultdict(list)
        self._indices: dict[Shape, list[int]] = defaultdict(list)
        self._captions: dict[int, tuple[Caption, ...]] = {}
        self._names: dict[int, str] = {}
        self._contents: dict[int, tuple[int, int]] = {}
        self._labels: dict[int, int] | None = {} if isinstance(condition, Classes) else None
        self._skipped: list[Skipped] = []

    def take(self, item: Item) -> None:
        """Read it, and encode its bucket where that has as many as are encoded together; or note that it is skipped."""
        try:
            with self._watch.at("reading"):
                contents = item.read()
                self._contents[item.index] = contents.digests()
                sample = contents.sample()
                bucket, pixels = bucket_pixels(sample.image, self._buckets, self._codec.color)
                label = _number(sample, self._condition) if isinstance(self._condition, Classes) else None
        except Unusable as error:
            self._skipped.append(Skipped(item.index, item.name, str(error)))
            self._on_progress(1, 1)
            return
        if self._labels is None or label is None:
            self._captions[item.index], self._names[item.index] = sample.captions, item.name
        else:
            self._labels[item.index] = label
        self._indices[self._codec.latent_shape(bucket)].append(item.index)
        self._waiting[bucket].append(pixels)
        if len(self._waiting[bucket]) * frames_of(bucket) >= self._codec.batch_size:
            self._encode(bucket)

    def _encode(self, bucket: tuple[int, ...]) -> None:
        codec, first = self._codec, self._first
        with self._watch.at("encoding"):
            shown = torch.from_numpy(np.stack(self._waiting.pop(bucket)))
            pixels = to_unit_range(shown)
            shape = codec.latent_shape(bucket)
            places = self._indices[shape][-len(pixels) :]
            # Convolutions may answer in channels_last memory, and files hold rows of [C, H, W].
            encoded = self._turn(lambda: codec.encode(pixels, places)).to("cpu", codec.stored_dtype).contiguous()
            if first is not None:
                self._frames[shape].append(self._turn(lambda: first.encode(shown)))
        self._latents[shape].append(encoded)
        self._on_progress(len(encoded), 0)

    def encoded(self) -> Encoded:
        """The features of all that was taken: the pictures that wait, and then the captions."""
        for bucket in list(self._waiting):
            self._encode(bucket)
        distinct = list(dict.fromkeys(caption.text for each in self._captions.values() for caption in each))
        with self._watch.at("encoding"):
            encoded = [] if isinstance(self._condition, Classes) else self._condition.encode(distinct)
        texts = dict(zip(distinct, encoded, strict=True))
        return Encoded(
            {shape: torch.cat(batches) for shape, batches in self._latents.items()},
            self._indices,
            self._captions,
            texts,
            self._skipped,
            self._labels,
            None if self._first is None else {shape: _joined(batches) for shape, batches in self._frames.items()},
            summed(self._cuts(texts)),
            self._contents,
        )

    def _cuts(self, texts: Mapping[str, Text]) -> Iterator[Cut]:
        """How each caption of each picture was cut."""
        for index, captions in self._captions.items():
            for cut in (cut for caption in captions for cut in texts[caption.text].cuts):
                yield replace(cut, samples=[self._names[index]])


def _joined(batches: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _number(sample: Sample, classes: Classes) -> int:
    assert sample.label is not None
    try:
        return classes.number(sample.label)
    except UserError as error:
        raise Unusable(str(error)) from None
