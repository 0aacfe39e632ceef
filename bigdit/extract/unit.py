"""One unit of work: a range of the source through the encoders into the features of one part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

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


def encode_unit(
    items: Sequence[Item],
    buckets: Sequence[tuple[int, ...]],
    codec: ImageCodec,
    condition: TextEncoder | Classes,
    on_progress: Callable[[int], None],
    watch: Stopwatch | None = None,
    first: FirstFrames | None = None,
    turn: Turn = at_once,
) -> Encoded:
    """Features of `items`, those that cannot be used left out: latents, and their captions encoded, or their classes;
    with `first`, what it keeps of first frames. All pictures come before the captions, in the `turn` of their encoders.

    `on_progress` hears of pictures done, and `watch` of the seconds that went into `reading` and `encoding`.
    """
    watch = watch or Stopwatch()
    waiting: dict[tuple[int, ...], list[npt.NDArray[np.uint8]]] = defaultdict(list)
    latents: dict[Shape, list[torch.Tensor]] = defaultdict(list)
    frames: dict[Shape, list[dict[str, torch.Tensor]]] = defaultdict(list)
    indices: dict[Shape, list[int]] = defaultdict(list)
    captions: dict[int, tuple[Caption, ...]] = {}
    labels: dict[int, int] | None = {} if isinstance(condition, Classes) else None
    skipped: list[Skipped] = []

    def encode_waiting(bucket: tuple[int, ...]) -> None:
        with watch.at("encoding"):
            shown = torch.from_numpy(np.stack(waiting.pop(bucket)))
            pixels = to_unit_range(shown)
            shape = codec.latent_shape(bucket)
            places = indices[shape][-len(pixels) :]
            # Convolutions may answer in channels_last memory, and files hold rows of [C, H, W].
            encoded = turn(lambda: codec.encode(pixels, places)).to("cpu", codec.stored_dtype).contiguous()
            if first is not None:
                frames[shape].append(turn(lambda: first.encode(shown)))
        latents[shape].append(encoded)
        on_progress(len(encoded))

    for item in items:
        try:
            with watch.at("reading"):
                sample = item.load()
                bucket, pixels = bucket_pixels(sample.image, buckets, codec.color)
                label = _number(sample, condition) if isinstance(condition, Classes) else None
        except Unusable as error:
            skipped.append(Skipped(item.index, item.name, str(error)))
            on_progress(1)
            continue
        if labels is None or label is None:
            captions[item.index] = sample.captions
        else:
            labels[item.index] = label
        indices[codec.latent_shape(bucket)].append(item.index)
        waiting[bucket].append(pixels)
        if len(waiting[bucket]) * frames_of(bucket) >= codec.batch_size:
            encode_waiting(bucket)
    for bucket in list(waiting):
        encode_waiting(bucket)
    distinct = list(dict.fromkeys(caption.text for each in captions.values() for caption in each))
    with watch.at("encoding"):
        encoded = [] if isinstance(condition, Classes) else condition.encode(distinct)
    return Encoded(
        {shape: torch.cat(batches) for shape, batches in latents.items()},
        indices,
        captions,
        dict(zip(distinct, encoded, strict=True)),
        skipped,
        labels,
        None if first is None else {shape: _joined(batches) for shape, batches in frames.items()},
    )


def _joined(batches: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _number(sample: Sample, classes: Classes) -> int:
    assert sample.label is not None
    try:
        return classes.number(sample.label)
    except UserError as error:
        raise Unusable(str(error)) from None
