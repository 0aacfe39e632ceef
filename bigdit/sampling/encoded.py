"""What encoders make of the captions and first frames of all pictures, on the host, before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image

from bigdit.config import RunConfig
from bigdit.encoders.codecs import ImageCodec
from bigdit.encoders.first_frame import load_first_frames
from bigdit.sampling.conditions import Given, Labels, SamplingOptions, Texts, Words, conditions_of
from bigdit.sampling.first_frame import first_frame_extras
from bigdit.sampling.turns import give_back
from bigdit.spec import ModelSpec
from bigdit.store.classes import Known

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Encoded:
    """Of so many pictures; `begun`: the extras of their first frames, a row each."""

    count: int
    guided: bool
    texts: Texts | Labels
    begun: Mapping[str, torch.Tensor]

    def of(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Given:
        """What these pictures are conditioned on; with guidance, followed by what they are led away from, which begins
        alike."""
        asked = [*numbers, *([self.count] * len(numbers) if self.guided else [])]
        given = self.texts.of(asked)
        frames = [*numbers, *numbers] if self.guided else list(numbers)
        begun = {name: each[frames] for name, each in self.begun.items()}
        return replace(given, extras={**given.extras, **begun}).rows(range(len(asked)), device, dtype)


def encoded(
    run: RunConfig,
    spec: ModelSpec,
    known: Known | None,
    captions: Sequence[str],
    images: Sequence[Image.Image],
    options: SamplingOptions,
    codec: ImageCodec,
    device: torch.device,
    words: Words,
) -> Encoded:
    """Of captions and `images`, one for all or one for each, by the run's encoders, which have `device` in turn and are
    gone from it then, and by `codec`, which is on the host. Raises UserError where one cannot be loaded, and in `words`
    for a class that is unknown."""
    texts = conditions_of(run, spec, known, captions, options, device, words)
    give_back(device)
    begun = _begun(run, images, options, codec, device)
    give_back(device)
    of_each = {name: each.expand(len(captions), *each.shape[1:]) for name, each in begun.items()}
    return Encoded(len(captions), options.guided, texts, of_each)


def _begun(
    run: RunConfig,
    images: Sequence[Image.Image],
    options: SamplingOptions,
    codec: ImageCodec,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    frames = load_first_frames(run.encoders.first_frame, codec, device)
    if frames is None:
        return {}
    codec.move(device)
    begun = first_frame_extras(frames, images, options.bucket)
    codec.move(_HOST)
    return begun
