"""What extraction's encoders take of a card, all of them there or by turns, from their rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from bigdit.catalog import Gpu
from bigdit.memory.process import cuda_context
from bigdit.profile.request import PICTURES, TEXTS

RehearsedSize = object

Way = Literal["together", "in turns"]

KEPT_FREE = 0.1
"""Of the card: for the pieces between allocations."""


class Side(NamedTuple):
    """Encoders of pictures, or of texts: bytes of their weights, with what one sample takes beside them, and each
    further one."""

    weights: float
    first: float
    further: float

    def taken(self, samples: int) -> float:
        """With so many samples at once."""
        return self.weights + self.first + self.further * (samples - 1)


class EncodersNeed(NamedTuple):
    """Both sides. `frames` of a sample's picture: 1, or those of a video."""

    pictures: Side
    texts: Side
    frames: int = 1

    def taken(self, way: Way, size: int) -> float:
        """Bytes with encoders.batch_size of so many frames, and captions, at once."""
        pictures, texts = self.pictures.taken(-(-size // self.frames)), self.texts.taken(size)
        if way == "in turns":
            return max(pictures, texts)
        return max(pictures + self.texts.weights, texts + self.pictures.weights)

    def way(self, gpu: Gpu, processes: int = 1) -> Way | None:
        """How each of `processes` on a card encodes one sample at a time; None: it has no room."""
        if self.taken("in turns", 1) > room(gpu, processes):
            return None
        alone = not self.texts.weights
        return "together" if alone or self.taken("together", 1) <= room(gpu, processes, KEPT_FREE) else "in turns"

    @property
    def waiting(self) -> float:
        """Bytes of weights that wait on the host, at the most, where they take turns."""
        return max(self.pictures.weights, self.texts.weights)

    @property
    def larger(self) -> tuple[str, float]:
        """The side that takes more with one sample, by name, and its bytes."""
        sides = {"text encoders": self.texts.taken(1), "VAE": self.pictures.taken(1)}
        name = max(sides, key=lambda each: sides[each])
        return name, sides[name]


def room(gpu: Gpu, processes: int = 1, kept_free: float = 0.0) -> float:
    """Bytes that each of `processes` on a card has for tensors."""
    context = cuda_context(gpu.compute_capability, gpu.multiprocessors)
    return gpu.usable_bytes * (1 - kept_free) / processes - context.high_bytes


def encoders_need(rehearsed: Sequence[RehearsedSize], text_bytes: int | None = None, frames: int = 1) -> EncodersNeed:
    """What rehearsals of one sample, and of more, say. `text_bytes`: of the text encoders' weights as they are loaded,
    where they are known to be more: a folder's may have parts that encode no text."""
    one = min(rehearsed, key=lambda size: size.micro_batch_size)
    many = max(rehearsed, key=lambda size: size.micro_batch_size)

    def side(phase: str) -> Side:
        found = one.ledger.phase(phase)
        weights = found.at_peak.get("encoder", 0)
        more = many.micro_batch_size - one.micro_batch_size
        further = (many.ledger.phase(phase).peak_bytes - found.peak_bytes) / more if more else 0
        return Side(weights, found.peak_bytes - weights, further)

    texts = side(TEXTS)
    return EncodersNeed(side(PICTURES), texts._replace(weights=max(texts.weights, text_bytes or 0)), frames)
