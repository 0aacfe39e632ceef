"""What a batch of pictures is conditioned on, and what guidance leads away from (Ho & Salimans, arXiv:2207.12598)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bigdit.catalog.conditions import CLASS_LABEL, no_class
from bigdit.config import RunConfig
from bigdit.config.data import TextEncoderConfig
from bigdit.encoders.load import load_text_encoder
from bigdit.encoders.protocol import shapes_of
from bigdit.errors import UserError
from bigdit.loader.batch import condition
from bigdit.loader.buffers import padded
from bigdit.objective_spec import SamplerName
from bigdit.store.schema import Classes, Known
from bigdit.strategy import ModelSpec


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
    """What a batch is conditioned on."""

    text_embeds: torch.Tensor | None
    text_mask: torch.Tensor | None
    extras: Mapping[str, torch.Tensor]

    def rows(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Given:
        """Those of the batch with these numbers, as a model that computes in `dtype` is fed them."""

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            return condition(tensor[list(numbers)], device, dtype)

        embeds, mask = (None if each is None else chosen(each) for each in (self.text_embeds, self.text_mask))
        return Given(embeds, mask, {name: chosen(each) for name, each in self.extras.items()})


class Texts:
    """Captions as the run's text encoder has them, on the host; the encoder takes nothing any more."""

    def __init__(
        self, config: TextEncoderConfig, captions: Sequence[str], options: SamplingOptions, device: torch.device
    ) -> None:
        encoder = load_text_encoder(config, device)
        texts = list(encoder.encode(captions))
        if options.guided:
            texts.append(encoder.null() if options.negative is None else encoder.encode([options.negative])[0])
        self._texts = [text.to("cpu", torch.float32) for text in texts]
        self._most = {name: most for name, (most, _) in shapes_of(encoder).items()}

    def of(self, numbers: Sequence[int]) -> Given:
        """Those of captions by their numbers; with guidance, the one after the last is what it leads away from."""
        return Given(*padded([self._texts[number] for number in numbers], self._most))


@dataclass(frozen=True)
class Words:
    """What a user calls the classes that are asked for, and how guidance is left out."""

    label: str = "--label"
    unguided: str = "pass --guidance 1"


class Labels:
    """Classes, which a checkpoint knows by their names or their number."""

    def __init__(
        self, known: Known, spec: ModelSpec, labels: Sequence[str], options: SamplingOptions, words: Words
    ) -> None:
        """Raises UserError with all that are unknown."""
        asked = [(words.label, label) for label in labels]
        if options.guided and options.negative is not None:
            asked.append(("--negative", options.negative))
        self._numbers = _numbers(Classes(known), asked)
        if options.guided and options.negative is None:
            away = no_class(spec)
            if away is None:
                raise UserError(f"guidance leads away from no class, which this model does not know; {words.unguided}")
            self._numbers.append(away)

    def of(self, numbers: Sequence[int]) -> Given:
        """As Texts.of."""
        return Given(None, None, {CLASS_LABEL: torch.tensor([self._numbers[number] for number in numbers])})


def _numbers(classes: Classes, asked: Sequence[tuple[str, str]]) -> list[int]:
    """Of labels, each with the option that asked for it. Raises UserError with all that are unknown."""
    found, problems = [], []
    for option, label in asked:
        try:
            found.append(classes.number(label))
        except UserError as error:
            problems.append(f"{option}: {error}")
    if problems:
        raise UserError(*problems)
    return found


def conditions_of(
    run: RunConfig,
    spec: ModelSpec,
    known: Known | None,
    captions: Sequence[str],
    options: SamplingOptions,
    device: torch.device,
    words: Words = Words(),
) -> Texts | Labels:
    """Of these captions, if the run is fed any, or of classes that are `known` to it; what encodes them is on `device`
    meanwhile. Raises UserError where it cannot be loaded, and for a class that is unknown."""
    if run.encoders.text is not None:
        return Texts(run.encoders.text, captions, options, device)
    assert known is not None  # of a run without captions
    return Labels(known, spec, captions, options, words)
