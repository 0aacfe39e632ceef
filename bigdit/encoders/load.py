"""Loads the encoders of a run. If they do not fit on a GPU together, they take turns on it.

Source of how first frames are encoded: diffusers 0.42.1, WanImageToVideoPipeline: prepare_latents, encode_image;
HunyuanVideo15ImageToVideoPipeline: prepare_cond_latents_and_mask, _get_image_embeds.
"""

from __future__ import annotations

import functools
import gc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from PIL import Image
from torch import nn

from bigdit import log
from bigdit.catalog.families import IMAGE_EMBEDS, IMAGE_ENCODER, editor_of
from bigdit.config.data import EncodersConfig, FirstFrameConfig, IdentityCodec, TextEncoderConfig, VaeCodec
from bigdit.encoders.folder import DTYPES, read_config, weights_sample
from bigdit.encoders.host_bytes import text_bytes
from bigdit.encoders.protocol import (
    CPU_BATCH,
    ImageCodec,
    Images,
    Keep,
    OneIsTooMuch,
    PixelCodec,
    TextEncoder,
    as_it_is,
    to_unit_range,
)
from bigdit.errors import UserError
from bigdit.shortage import memory_errors, ran_out
from bigdit.store.part import FIRST_FRAME
from bigdit.store.tensors import config_digest, weights_digest
from bigdit.store.text import Text
from bigdit.units import gib

R = TypeVar("R")
_CPU = torch.device("cpu")


class Turn(Protocol):
    """Calls a function that uses encoders while they are on their device."""

    def __call__(self, run: Callable[[], R], /) -> R: ...


def at_once(run: Callable[[], R], /) -> R:
    """The turn of encoders that never move."""
    return run()


class HasModules(Protocol):
    """An encoder with modules that can be moved."""

    def modules(self) -> list[nn.Module]: ...


E = TypeVar("E", bound=HasModules)


@dataclass
class EncoderSide:
    """Encoders that are on the device together. For out-of-memory errors: `title`, their name, and `fix`."""

    title: str
    fix: str
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of their weights."""
        return sum(tensor.nbytes for module in self.modules for tensor in module.parameters())

    def to(self, device: torch.device | str) -> None:
        """Move them to `device`."""
        for module in self.modules:
            module.to(device)


class Turns:
    """The sides of one process. All are on `device` until memory runs out. Then `note` is called, and from then on only
    the side in use is on the device. The others are in CPU memory."""

    def __init__(self, device: torch.device, sides: Sequence[EncoderSide], note: Callable[[str], None]) -> None:
        self._device, self._sides, self._note = device, sides, note
        self._apart = False
        self._here: EncoderSide | None = None

    def load(self, side: EncoderSide, load: Callable[[], E]) -> E:
        """Load an encoder of a side in its turn. Raises UserError if this side does not fit even alone."""
        encoder: E = self._run(side, load)
        side.modules += encoder.modules()
        return encoder

    def of(self, side: EncoderSide) -> Turn:
        """The turn of a side. It raises UserError if this side does not fit even alone."""
        return partial(self._run, side)

    def _run(self, side: EncoderSide, run: Callable[[], R], /) -> R:
        others = [other for other in self._sides if other is not side]
        if not self._apart and self._device.type != "cpu" and any(other.modules for other in others):
            result = _attempt(run)
            if result is not None:
                return result[0]
            self._apart = True
            self._note(self._message())
        if self._apart and self._here is not side:
            self._clear()
        with memory_errors(side.title, self._device, side.fix):
            if self._apart and self._here is not side:
                side.to(self._device)
                self._here = side
            return run()

    def _clear(self) -> None:
        """Move all sides to CPU memory. Raises UserError if CPU memory runs out.

        The next side moves too. Otherwise its small weights would keep torch from freeing whole segments.
        """
        for each in self._sides:
            with memory_errors(f"{each.title} that waits for its turn in CPU memory", _CPU, "use fewer workers"):
                each.to(_CPU)
        gc.collect()  # tensors of the failed attempt
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _message(self) -> str:
        waiting = gib(max(side.nbytes for side in self._sides))
        return (
            "note: text encoders and VAE do not fit on the GPU together, and take turns: in each part the images are "
            f"encoded first, then the captions; up to {waiting} of weights wait in CPU memory"
        )


def _attempt(run: Callable[[], R]) -> tuple[R] | None:
    """The result; None if memory ran out. Drops the error, since it keeps tensors allocated."""
    try:
        return (run(),)
    except OneIsTooMuch:
        return None
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return None


_IMAGE_FIX = "use smaller data.buckets, encoders.image.dtype: bf16, encoders.image.tiling or fewer workers"


@dataclass(frozen=True)
class Encoders:
    """The encoders of a run and their device. `text`: None if images have classes. `first_frame`: for image-to-video
    models. `of_images`: the turn of image and first_frame."""

    image: ImageCodec
    text: TextEncoder | None
    device: torch.device
    first_frame: FirstFrames | None = None
    of_images: Turn = at_once


def load_encoders(
    config: EncodersConfig, worker: int = 0, note: Callable[[str], None] = log.notice, references: int = 0
) -> Encoders:
    """The encoders of the `worker`-th process of this machine, for samples with `references`.

    Texts are cached in CPU memory. If the encoders do not fit on the device together, they take turns, and `note` is
    called. Raises UserError if they cannot be loaded.
    """
    device = encoding_device(config.device, worker)
    size = captions = CPU_BATCH if config.batch_size == "auto" else config.batch_size
    if config.batch_size == "auto" and device.type == "cpu":
        # This is as fast on one core (benchmarks/README.md). Matrix products of other shapes round differently. Alone,
        # a caption has the same bytes in any part, so any split of the work gives the same store.
        captions = 1
    texts, images = _text_side(config.text, device), EncoderSide("encoders.image", _IMAGE_FIX)
    turns = Turns(device, (texts, images), note)
    text = frames = None
    if (text_config := config.text) is not None:
        encoder = turns.load(texts, lambda: load_text_encoder(text_config, device, captions, references))
        text = TextCache(encoder, turn=turns.of(texts))
    image = turns.load(images, lambda: load_image_codec(config.image, device, size))
    if (first := config.first_frame) is not None:
        frames = turns.load(images, lambda: FirstFrames(first, image, device))
    return Encoders(image, text, device, frames, turns.of(images))


def _text_side(text: TextEncoderConfig | None, device: torch.device) -> EncoderSide:
    if text is None:
        return EncoderSide("encoders.text", "")
    nbytes = text_bytes(text)
    weights = "" if nbytes is None else f", whose weights take {gib(nbytes)} in {text.dtype},"
    half = "encoders.text.dtype: bf16 (half the bytes), " if text.dtype == "fp32" else ""
    on_cpu = "" if device.type == "cpu" else " or encoders.device: cpu"
    return EncoderSide(f"encoders.text{weights}", f"use {half}fewer workers{on_cpu}")


def load_image_codec(
    config: IdentityCodec | VaeCodec, device: torch.device | str = "cpu", batch_size: int = CPU_BATCH
) -> ImageCodec:
    """The image codec of a run, on `device`, with batches of at most `batch_size` images.

    Raises UserError if its weights cannot be loaded.
    """
    if isinstance(config, IdentityCodec):
        return PixelCodec(config, batch_size)
    from bigdit.encoders.vae import DiffusersVae  # diffusers takes seconds to import

    return DiffusersVae(config, device, batch_size)


def load_text_encoder(
    config: TextEncoderConfig, device: torch.device | str = "cpu", batch_size: int = CPU_BATCH, references: int = 0
) -> TextEncoder:
    """The text encoder of a run, on `device`, with batches of at most `batch_size` captions.

    `references`: how many images come before an edit. Raises UserError if it cannot be loaded.
    """
    # transformers and diffusers take seconds to import.
    if config.pipeline is not None:
        from bigdit.encoders.components import KEY, read_index
        from bigdit.encoders.pipeline import PipelineTextEncoder

        if editor_of(read_index(KEY, config.pipeline)["_class_name"]).seen:
            from bigdit.encoders.edits import EditTextEncoder

            return EditTextEncoder(config, references, device)

        return PipelineTextEncoder(config, device, batch_size)
    from bigdit.encoders.t5 import T5TextEncoder

    return T5TextEncoder(config, device, batch_size)


_FIRST_FRAME = "encoders.first_frame.pipeline"
_SIGLIP = "SiglipVisionModel"
"""Models take the last states of this image encoder. Of CLIP they take the states before its last layer."""


class FirstFrames:
    """Encodes first frames of videos for a store, in bf16."""

    def __init__(self, config: FirstFrameConfig, codec: ImageCodec, device: torch.device) -> None:
        """Load the image encoder, if there is one. Raises UserError if it cannot be loaded."""
        self._config, self._codec, self._device = config, codec, device
        self.mask, self.color = codec.first_mask, codec.color
        self._encoder: Any = None
        self._processor: Any = None
        if config.pipeline is not None:
            self._encoder, self._processor = self._load(config.pipeline)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """As StoreSchema.first_frame: channels of the mask, and the image encoder with digests of its weights."""
        if self._encoder is None or self._config.pipeline is None:
            return {"mask": self.mask}
        folder = self._config.pipeline / IMAGE_ENCODER
        tokens, dim = self._embeds(torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8)).shape[1:]
        return {
            "mask": self.mask,
            "tokens": tokens,
            "dim": dim,
            "class_name": type(self._encoder).__name__,
            "dtype": self._config.dtype,
            "config": config_digest(read_config(_FIRST_FRAME, folder)),
            "weights": weights_digest(self._encoder.state_dict()),
            "weights_sample": weights_sample(folder, self._config.dtype),
            "processor": config_digest(self._processor.to_dict()),
        }

    def modules(self) -> list[nn.Module]:
        """The image encoder, if any. The modules of the codec belong to the codec."""
        return [] if self._encoder is None else [self._encoder]

    def encode(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """By name, latents [B, C, f, h, w] and embeddings [B, tokens, dim] of videos uint8 [B, 1 or 3, F, H, W], or of
        images without F."""
        videos = pixels.unsqueeze(2) if pixels.dim() == 4 else pixels
        found = {FIRST_FRAME: self._codec.encode_first(to_unit_range(videos))}
        if self._encoder is not None:
            found[IMAGE_EMBEDS] = self._embeds(videos)
        return {name: each.to("cpu", torch.bfloat16).contiguous() for name, each in found.items()}

    @torch.no_grad()
    def _embeds(self, videos: torch.Tensor) -> torch.Tensor:
        """Encode frames one by one, so a frame has the same bytes in any batch."""
        rows = []
        for video in videos:
            image = Image.fromarray(video[:, 0].permute(1, 2, 0).expand(-1, -1, 3).contiguous().numpy())
            given = self._processor(images=image, return_tensors="pt").to(self._device, DTYPES[self._config.dtype])
            if type(self._encoder).__name__ == _SIGLIP:
                rows.append(self._encoder(**given).last_hidden_state)
            else:
                rows.append(self._encoder(**given, output_hidden_states=True).hidden_states[-2])
        return torch.cat(rows)

    def _load(self, folder: Path) -> tuple[Any, Any]:
        """The image encoder and processor in the folder of a pipeline."""
        from bigdit.encoders.components import load_part, read_index  # transformers takes seconds to import

        index = read_index(_FIRST_FRAME, folder)
        parts = []
        siglip = _SIGLIP in (index.get(IMAGE_ENCODER) or ())
        for name in (IMAGE_ENCODER, "feature_extractor" if siglip else "image_processor"):
            entry = index.get(name)
            if not isinstance(entry, list) or not entry[0]:
                raise UserError(f"{_FIRST_FRAME}: {folder} holds a {index['_class_name']} without {name}")
            parts.append(load_part(_FIRST_FRAME, folder, name, entry, DTYPES[self._config.dtype], self._device))
        return parts[0], parts[1]


def encoding_device(asked: Literal["auto", "cpu", "cuda"], worker: int = 0) -> torch.device:
    """The device of the `worker`-th process of this machine: one of its GPUs, or the CPU if auto finds no GPU.

    Raises UserError if GPUs are required and there are none.
    """
    gpus = torch.cuda.device_count()
    if asked == "cpu" or (asked == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UserError("encoders.device is cuda, and torch finds no GPU here; use auto or cpu")
    return torch.device("cuda", worker % gpus)


CAPACITY_BYTES = 256 * 2**20
"""Enough for about 500 captions of Sana (103 × 2304 in bf16 on average), or 90 of Stable Diffusion 3 (333 × 4096)."""


class TextCache:
    """An encoder that caches its texts in CPU memory, in bf16, up to `capacity_bytes`.

    Drops the least recently used texts. The encoder runs in its `turn`.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        capacity_bytes: int = CAPACITY_BYTES,
        turn: Turn = at_once,
    ) -> None:
        self._encoder = encoder
        self._turn = turn
        self._capacity_bytes = capacity_bytes
        self._cached: OrderedDict[str, Text] = OrderedDict()
        self.nbytes = 0
        self.dim, self.pooled_dim, self.max_tokens = encoder.dim, encoder.pooled_dim, encoder.max_tokens
        self.streams = encoder.streams

    @property
    def identity(self) -> dict[str, Any]:
        """That of the encoder."""
        return self._encoder.identity

    def modules(self) -> list[nn.Module]:
        """Those of the encoder."""
        return self._encoder.modules()

    def encode(self, captions: Sequence[str], kept: Keep = as_it_is, images: Images = ()) -> list[Text]:
        """The texts of captions. Encodes each distinct caption that is not cached once. Texts with `images` belong to
        one sample, and are not cached."""
        if images:
            return [kept(text) for text in self._turn(lambda: self._encoder.encode(captions, self._to_cpu, images))]
        distinct = list(dict.fromkeys(captions))
        unknown = [caption for caption in distinct if caption not in self._cached]
        encoded = self._turn(lambda: self._encoder.encode(unknown, self._to_cpu)) if unknown else []
        texts = {caption: self._cached[caption] for caption in distinct if caption in self._cached}
        texts |= zip(unknown, encoded, strict=True)
        for caption in distinct:
            self._add(caption, texts[caption])
        return [kept(texts[caption]) for caption in captions]

    def null(self) -> Text:
        """The null text of the encoder."""
        return self._to_cpu(self._turn(self._encoder.null))

    def _to_cpu(self, text: Text) -> Text:
        return text.to("cpu", torch.bfloat16)

    def _add(self, caption: str, text: Text) -> None:
        """Put the text last, and drop the first ones until all fit."""
        if caption not in self._cached:
            self.nbytes += text.nbytes
        self._cached[caption] = text
        self._cached.move_to_end(caption)
        while self.nbytes > self._capacity_bytes:
            _, dropped = self._cached.popitem(last=False)
            self.nbytes -= dropped.nbytes
