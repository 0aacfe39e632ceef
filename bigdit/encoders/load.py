"""The encoders of a run, as a process that extracts uses them; where a card does not hold all, they take turns."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import nn

from bigdit import log
from bigdit.config.data import EncodersConfig, TextEncoderConfig
from bigdit.encoders.batch_size import CPU_BATCH, OneIsTooMuch
from bigdit.encoders.codecs import ImageCodec, load_image_codec
from bigdit.encoders.first_frame import FirstFrames, load_first_frames
from bigdit.encoders.host_bytes import text_bytes
from bigdit.encoders.text_encoder import Keep, TextEncoder, as_it_is
from bigdit.errors import UserError
from bigdit.shortage import memory_errors, ran_out
from bigdit.store.text import Text
from bigdit.units import gib

R = TypeVar("R")
_HOST = torch.device("cpu")


class Turn(Protocol):
    """Calls what asks some encoders, while these are on their device."""

    def __call__(self, ask: Callable[[], R], /) -> R: ...


def at_once(ask: Callable[[], R], /) -> R:
    """The turn of encoders that stay where they are."""
    return ask()


class HasModules(Protocol):
    """What is asked of an encoder: what moves."""

    def modules(self) -> list[nn.Module]: ...


E = TypeVar("E", bound=HasModules | None)


@dataclass
class Side:
    """Encoders that are on the device together. `title`: what they are called where they run out of memory; `less`:
    what takes less of it."""

    title: str
    less: str
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of their weights."""
        return sum(tensor.nbytes for module in self.modules for tensor in module.parameters())

    def to(self, device: torch.device | str) -> None:
        """Move them there."""
        for module in self.modules:
            module.to(device)


class Turns:
    """The sides of one process: all on `device` until memory does not do for what one is asked, and from then on the
    one that is asked, the others on the host. `note` is told when that begins."""

    def __init__(self, device: torch.device, sides: Sequence[Side], note: Callable[[str], None]) -> None:
        self._device, self._sides, self._note = device, sides, note
        self._apart = False
        self._here: Side | None = None

    def load(self, side: Side, load: Callable[[], E]) -> E:
        """Encoders of a side, loaded in its turn. Raises UserError where the device does not hold them alone."""
        encoder: E = self._ask(side, load)
        side.modules += [] if encoder is None else encoder.modules()
        return encoder

    def of(self, side: Side) -> Turn:
        """The turn of a side. It raises UserError where memory does not do for what it is asked alone."""
        return partial(self._ask, side)

    def _ask(self, side: Side, ask: Callable[[], R], /) -> R:
        if not self._apart and self._device.type != "cpu" and any(other.modules for other in self._others(side)):
            answer = _attempt(ask)
            if answer is not None:
                return answer[0]
            self._apart = True
            self._note(self._said())
        if self._apart and self._here is not side:
            self._clear()
        with memory_errors(side.title, self._device, side.less):
            if self._apart and self._here is not side:
                side.to(self._device)
                self._here = side
            return ask()

    def _clear(self) -> None:
        """Have all wait on the host, the side that comes too: while they were there together it has put small weights
        between the others', which hold torch's segments. Raises UserError where the host has no room for them."""
        for each in self._sides:
            with memory_errors(
                f"{each.title} that waits for its turn on the host", _HOST, "fewer workers take less of it"
            ):
                each.to(_HOST)
        gc.collect()  # what was half loaded, or half encoded, when memory ran out
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _others(self, side: Side) -> list[Side]:
        return [other for other in self._sides if other is not side]

    def _said(self) -> str:
        waiting = gib(max(side.nbytes for side in self._sides))
        return (
            "note: text encoders and VAE have no room on the card together, and take turns: of each part the pictures "
            f"first, then the captions; up to {waiting} of weights wait on the host"
        )


def _attempt(ask: Callable[[], R]) -> tuple[R] | None:
    """The answer; None where memory ran out. The error, which holds what was allocated, ends here."""
    try:
        return (ask(),)
    except OneIsTooMuch:
        return None
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return None


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
