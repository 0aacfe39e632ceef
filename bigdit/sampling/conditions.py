"""What a batch of pictures is conditioned on, and what guidance leads away from (Ho & Salimans, arXiv:2207.12598)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bigdit.catalog.classes import CLASS_LABEL, no_class
from bigdit.config import RunConfig
from bigdit.config.encoders import TextEncoderConfig
from bigdit.encoders.load import load_text_encoder
from bigdit.encoders.text_encoder import shapes_of
from bigdit.errors import UserError
from bigdit.loader.padded import padded
from bigdit.objective_spec import SamplerName
from bigdit.spec import ModelSpec
from bigdit.store.classes import Classes, Known


@dataclass(frozen=True)
class SamplingOptions:
    """`height` and `width` in pixels, and `frames` of a video; `guidance` 1 is none (Ho & Salimans, arXiv:2207.12598).

    `negative`: what guidance leads away from; left out, the empty caption, or no class. `sampler`: left out, the
    objective's own. `micro_batch_size`: pictures at once, where memory does for as many.
    """

    height: int
    width: int
    steps: int = 20
    guidance: float = 3.0
    negative: str | None = None
    sampler: SamplerName | None = None
    seed: int = 0
    micro_batch_size: int = 50
    frames: int | None = None

    @property
    def bucket(self) -> tuple[int, ...]:
        """As runs name it."""
        return (self.height, self.width) if self.frames is None else (self.frames, self.height, self.width)

    @property
    def size(self) -> str:
        """The option that asks for it."""
        return f"--size {'x'.join(map(str, self.bucket))}"

    @property
    def guided(self) -> bool:
        """Whether it leads away from anything."""
        return self.guidance != 1


@dataclass(frozen=True)
class Given:
    """What a batch is conditioned on; with guidance, followed by what it is led away from."""

    text_embeds: torch.Tensor | None
    text_mask: torch.Tensor | None
    extras: Mapping[str, torch.Tensor]


class Texts:
    """Conditions of captions, by the run's text encoder."""

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        self._encoder, self._device = load_text_encoder(config, device), device
        self._null = self._encoder.null()

    def of(self, captions: Sequence[str], options: SamplingOptions) -> Given:
        """Those of captions."""
        texts = list(self._encoder.encode(captions))
        if options.guided:
            away = self._null if options.negative is None else self._encoder.encode([options.negative])[0]
            texts += [away] * len(captions)
        texts = [text.to(self._device, torch.float32) for text in texts]
        return Given(*padded(texts, {name: most for name, (most, _) in shapes_of(self._encoder).items()}))


@dataclass(frozen=True)
class Words:
    """What a user calls the classes that are asked for, and how guidance is left out."""

    label: str = "--label"
    unguided: str = "pass --guidance 1"


class Labels:
    """Conditions of classes, which a checkpoint knows by their names or their number."""

    def __init__(self, known: Known, spec: ModelSpec, device: torch.device, words: Words) -> None:
        self._classes, self._no_class, self._device = Classes(known), no_class(spec), device
        self._words = words

    def of(self, labels: Sequence[str], options: SamplingOptions) -> Given:
        """Those of classes by their names or numbers. Raises UserError for one that is unknown."""
        numbers = [self._number(self._words.label, label) for label in labels]
        if options.guided:
            away = self._no_class if options.negative is None else self._number("--negative", options.negative)
            if away is None:
                raise UserError(
                    f"guidance leads away from no class, which this model does not know; {self._words.unguided}"
                )
            numbers += [away] * len(labels)
        return Given(None, None, {CLASS_LABEL: torch.tensor(numbers, device=self._device)})

    def _number(self, option: str, label: str) -> int:
        try:
            return self._classes.number(label)
        except UserError as error:
            raise UserError(f"{option}: {error}") from None


def conditions_of(
    run: RunConfig, spec: ModelSpec, known: Known | None, device: torch.device, words: Words = Words()
) -> Texts | Labels:
    """Of the captions that a run is fed, or of the classes that are `known` to it. Raises UserError where its text
    encoder cannot be loaded."""
    if run.encoders.text is not None:
        return Texts(run.encoders.text, device)
    assert known is not None  # of a run without captions
    return Labels(known, spec, device, words)
