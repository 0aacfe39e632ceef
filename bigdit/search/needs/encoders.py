"""What extraction's encoders take of a GPU, all of them there or in turns, from attempts of them alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from bigdit.catalog import Gpu
from bigdit.memory.process import cuda_context
from bigdit.profile.attempt import Attempt
from bigdit.profile.request import PICTURES, TEXTS, weights_of

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


def encoders_need(encoding: Mapping[int, Attempt], text_bytes: int | None = None, frames: int = 1) -> EncodersNeed:
    """What attempts with one sample, and with more, say. `text_bytes`: of the text encoders' weights as they are
    loaded, where they are known to be more: a folder's may have parts that encode no text."""
    few, many = min(encoding), max(encoding)

    def side(phase: str) -> Side:
        peak, most = (encoding[samples].phases[phase].peak_bytes for samples in (few, many))
        weights = encoding[few].phases[weights_of(phase)].end_bytes
        return Side(weights, peak - weights, (most - peak) / (many - few) if many > few else 0)

    texts = side(TEXTS)
    return EncodersNeed(side(PICTURES), texts._replace(weights=max(texts.weights, text_bytes or 0)), frames)
