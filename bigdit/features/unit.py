"""One unit of work: a range of the source through the encoders into the features of one part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from bigdit.features.buckets import bucket_pixels
from bigdit.features.codecs import ImageCodec, to_unit_range
from bigdit.features.part import Encoded, Shape, Skipped
from bigdit.features.source import Item, Unusable
from bigdit.features.text import TextEncoder

TEXT_DTYPE = torch.bfloat16  # what training computes in; half the bytes of fp32


def encode_unit(
    items: Sequence[Item],
    buckets: Sequence[tuple[int, int]],
    codec: ImageCodec,
    text_encoder: TextEncoder,
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
        shape = codec.latent_shape(bucket)
        places = indices[shape][-len(pixels) :]
        # Convolutions may answer in channels_last memory, and files hold rows of [C, H, W].
        encoded = codec.encode(pixels, places).to("cpu", codec.stored_dtype).contiguous()
        latents[shape].append(encoded)
        on_progress(len(encoded))

    for item in items:
        try:
            image, caption = item.load()
            bucket, pixels = bucket_pixels(image, buckets, codec.color)
        except Unusable as error:
            skipped.append(Skipped(item.index, item.name, str(error)))
            on_progress(1)
            continue
        captions[item.index] = caption
        indices[codec.latent_shape(bucket)].append(item.index)
        waiting[bucket].append(pixels)
        if len(waiting[bucket]) == codec.batch_size:
            encode_waiting(bucket)
    for bucket in list(waiting):
        encode_waiting(bucket)
    distinct = list(dict.fromkeys(captions.values()))
    texts = text_encoder.encode(distinct)
    return Encoded(
        {shape: torch.cat(batches) for shape, batches in latents.items()},
        indices,
        captions,
        {caption: text.states.to("cpu", TEXT_DTYPE) for caption, text in zip(distinct, texts, strict=True)},
        skipped,
    )
