"""The encoders of a run, as a process that extracts uses them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from bigdit import log
from bigdit.config.data import EncodersConfig, TextEncoderConfig
from bigdit.encoders.batch_size import CPU_BATCH
from bigdit.encoders.codecs import ImageCodec, load_image_codec
from bigdit.encoders.first_frame import FirstFrames, load_first_frames
from bigdit.encoders.host_bytes import text_bytes
from bigdit.encoders.text_encoder import Keep, TextEncoder, as_it_is
from bigdit.encoders.turns import Side, Turn, Turns, at_once
from bigdit.errors import UserError
from bigdit.store.text import Text
from bigdit.units import gib

_LESS = "smaller data.buckets, encoders.image.dtype: bf16, encoders.image.tiling or fewer workers take less"


@dataclass(frozen=True)
class Encoders:
    """What turns pictures and captions into features, and where; no text where pictures have classes, and `first_frame`
    for models that begin with a picture alone."""

    image: ImageCodec
    text: TextEncoder | None
    device: torch.device
    first_frame: FirstFrames | None = None
    of_pictures: Turn = at_once


def load_encoders(config: EncodersConfig, worker: int = 0, note: Callable[[str], None] = log.notice) -> Encoders:
    """The encoders of the `worker`-th process of this machine; texts that come again are kept on the host.

    Where its device does not hold them all they take turns, of which `note` is told: text encodes in its own, and
    what image and first_frame are asked is called by `of_pictures`. Raises UserError where they cannot be loaded.
    """
    device = encoding_device(config.device, worker)
    size = captions = CPU_BATCH if config.batch_size == "auto" else config.batch_size
    if config.batch_size == "auto" and device.type == "cpu":
        # As fast on one core (benchmarks/README.md), and matrix products of other shapes round otherwise:
        # alone, a caption has the same bytes in whatever part it comes first, so any split of the work gives the same
        # store.
        captions = 1
    texts, pictures = _side_of_text(config.text, device), Side("encoders.image", _LESS)
    turns = Turns(device, (texts, pictures), note)
    text = None
    if (asked := config.text) is not None:
        encoder = turns.load(texts, lambda: load_text_encoder(asked, device, captions))
        text = TextCache(encoder, turn=turns.of(texts))
    image = turns.load(pictures, lambda: load_image_codec(config.image, device, size))
    frames = turns.load(pictures, lambda: load_first_frames(config.first_frame, image, device))
    return Encoders(image, text, device, frames, turns.of(pictures))


def _side_of_text(text: TextEncoderConfig | None, device: torch.device) -> Side:
    if text is None:
        return Side("encoders.text", "")
    nbytes = text_bytes(text)
    weights = "" if nbytes is None else f", whose weights take {gib(nbytes)} in {text.dtype},"
    half = "encoders.text.dtype: bf16 takes half, " if text.dtype == "fp32" else ""
    on_host = "" if device.type == "cpu" else " or encoders.device: cpu"
    return Side(f"encoders.text{weights}", f"{half}fewer workers{on_host} take less")


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


def encoding_device(asked: Literal["auto", "cpu", "cuda"], worker: int = 0) -> torch.device:
    """The device of the `worker`-th process of this machine: its GPUs by turns, or the CPU where auto finds none.

    Raises UserError where GPUs are asked for and there are none.
    """
    gpus = torch.cuda.device_count()
    if asked == "cpu" or (asked == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UserError("encoders.device is cuda, and torch finds no GPU here; use auto or cpu")
    return torch.device("cuda", worker % gpus)


CAPACITY_BYTES = 256 * 2**20
"""About 500 captions of Sana's (103 × 2304 in bf16 on the mean), or 90 of Stable Diffusion 3's (333 × 4096)."""


class TextCache:
    """An encoder whose texts are on the host in `dtype`, and of which at most so many bytes are kept between calls:
    the longest unused go first. It is asked in its `turn`."""

    def __init__(
        self,
        encoder: TextEncoder,
        dtype: torch.dtype = torch.bfloat16,
        capacity_bytes: int = CAPACITY_BYTES,
        turn: Turn = at_once,
    ) -> None:
        self._encoder = encoder
        self._turn = turn
        self._dtype = dtype
        self._capacity_bytes = capacity_bytes
        self._kept: OrderedDict[str, Text] = OrderedDict()
        self.nbytes = 0
        self.dim, self.pooled_dim, self.max_tokens = encoder.dim, encoder.pooled_dim, encoder.max_tokens
        self.streams = encoder.streams

    @property
    def identity(self) -> dict[str, Any]:
        """The encoder's."""
        return self._encoder.identity

    def modules(self) -> list[nn.Module]:
        """The encoder's."""
        return self._encoder.modules()

    def encode(self, captions: Sequence[str], kept: Keep = as_it_is) -> list[Text]:
        """Captions to their texts, each distinct one that is not known encoded once."""
        distinct = list(dict.fromkeys(captions))
        unknown = [caption for caption in distinct if caption not in self._kept]
        encoded = self._turn(lambda: self._encoder.encode(unknown, self._to_host)) if unknown else []
        texts = {caption: self._kept[caption] for caption in distinct if caption in self._kept}
        texts |= zip(unknown, encoded, strict=True)
        for caption in distinct:
            self._keep(caption, texts[caption])
        return [kept(texts[caption]) for caption in captions]

    def null(self) -> Text:
        """The encoder's."""
        return self._to_host(self._turn(self._encoder.null))

    def _to_host(self, text: Text) -> Text:
        return text.to("cpu", self._dtype)

    def _keep(self, caption: str, text: Text) -> None:
        """Put the text last, and let the first go until all fit."""
        if caption not in self._kept:
            self.nbytes += text.nbytes
        self._kept[caption] = text
        self._kept.move_to_end(caption)
        while self.nbytes > self._capacity_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes
