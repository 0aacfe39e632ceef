"""One unit of work: a range of the source through the encoders into the features of one part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from bigdit.features.buckets import bucket_pixels
from bigdit.features.codecs import ImageCodec, to_unit_range
from bigdit.features.encoders.text import T5TextEncoder
from bigdit.features.part import Encoded, Shape, Skipped
from bigdit.features.sources import Item, Unusable

ENCODE_BATCH = 16  # pictures that the codec is given at once; more cost memory and, on a CPU, gain no speed
TEXT_DTYPE = torch.bfloat16  # what training computes in; half the bytes of fp32


def encode_unit(
    items: Sequence[Item],
    buckets: Sequence[tuple[int, int]],
    codec: ImageCodec,
    text_encoder: T5TextEncoder,
    on_progress: Callable[[int], None],
) -> Encoded:
    """Features of `items`, those that cannot be used left out; `on_progress` hears of pictures done."""
    waiting: dict[tuple[int, int], list[npt.NDArray[np.uint8]]] = defaultdict(list)
    latents: dict[Shape, list[torch.Tensor]] = defaultdict(list)
    indices: dict[Shape, list[int]] = defaultdict(list)
    captions: dict[int, str] = {}
    skipped: list[Skipped] = []

    def encode_waiting(bucket: tuple[int, int]) -> None:
        pixels = to_unit_range(torch.from_numpy(np.stack(waiting.pop(bucket))))
        # Convolutions may answer in channels_last memory, and files hold rows of [C, H, W].
        encoded = codec.encode(pixels).to("cpu", codec.stored_dtype).contiguous()
        latents[_shape(codec, bucket)].append(encoded)
        on_progress(len(encoded))

    for item in items:
        try:
            sample = item.load()
        except Unusable as error:
            skipped.append(Skipped(item.index, item.name, str(error)))
            on_progress(1)
            continue
        bucket, pixels = bucket_pixels(sample.image, buckets, codec.color)
        captions[item.index] = max(sample.captions, key=lambda caption: caption.weight).text
        indices[_shape(codec, bucket)].append(item.index)
        waiting[bucket].append(pixels)
        if len(waiting[bucket]) == ENCODE_BATCH:
            encode_waiting(bucket)
    for bucket in list(waiting):
        encode_waiting(bucket)
    distinct = list(dict.fromkeys(captions.values()))
    texts = text_encoder.encode(distinct)
    return Encoded(
        {shape: torch.cat(batches) for shape, batches in latents.items()},
        indices,
        captions,
        {caption: text.to("cpu", TEXT_DTYPE) for caption, text in zip(distinct, texts, strict=True)},
        skipped,
    )


def _shape(codec: ImageCodec, bucket: tuple[int, int]) -> Shape:
    """The latents of a bucket, which the codec downsamples."""
    return codec.channels, bucket[0] // codec.downsample, bucket[1] // codec.downsample
