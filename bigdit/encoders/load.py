"""The encoders of a run, as a process that extracts uses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bigdit.config.encoders import EncodersConfig, TextEncoderConfig
from bigdit.encoders.batch_size import CPU_BATCH
from bigdit.encoders.codecs import ImageCodec, load_image_codec
from bigdit.encoders.device import encoding_device
from bigdit.encoders.first_frame import FirstFrames, load_first_frames
from bigdit.encoders.text_cache import TextCache
from bigdit.encoders.text_encoder import TextEncoder


@dataclass(frozen=True)
class Encoders:
    """What turns pictures and captions into features, and where; no text where pictures have classes, and `first_frame`
    for models that begin with a picture alone."""

    image: ImageCodec
    text: TextEncoder | None
    device: torch.device
    first_frame: FirstFrames | None = None


def load_encoders(config: EncodersConfig, worker: int = 0) -> Encoders:
    """The encoders of the `worker`-th process of this machine; texts that come again are kept on the host.

    Raises UserError where they cannot be loaded.
    """
    device = encoding_device(config.device, worker)
    size = captions = CPU_BATCH if config.batch_size == "auto" else config.batch_size
    if config.batch_size == "auto" and device.type == "cpu":
        # As fast on one core (benchmarks/data/text_batches.py), and matrix products of other shapes round otherwise:
        # alone, a caption has the same bytes in whatever part it comes first, so any split of the work gives the same
        # store.
        captions = 1
    text = None if config.text is None else TextCache(load_text_encoder(config.text, device, captions))
    image = load_image_codec(config.image, device, size)
    return Encoders(image, text, device, load_first_frames(config.first_frame, image, device))


def load_text_encoder(
    config: TextEncoderConfig, device: torch.device | str = "cpu", batch_size: int = CPU_BATCH
) -> TextEncoder:
    """The text encoder that a run names, on `device`, for at most `batch_size` captions at once.

    Raises UserError where it cannot be loaded.
    """
    # Only here: transformers and diffusers take seconds to import.
    if config.pipeline is not None:
        from bigdit.encoders.pipeline import PipelineTextEncoder

        return PipelineTextEncoder(config, device, batch_size)
    from bigdit.encoders.t5 import T5TextEncoder

    return T5TextEncoder(config, device, batch_size)
