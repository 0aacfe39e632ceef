"""The sections of a run's YAML that monitor its training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from bigdit.numbers import Count, Natural, NotNegative, Number
from bigdit.strategy import Section

TrackerName = Literal["tensorboard", "wandb", "trackio", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab"]
"""As accelerate calls them, and as their packages are called."""


def _text(value: Any) -> Any:
    """The number of a class as a text, as YAML has it without quotes; pydantic judges the rest."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Caption = Annotated[str, BeforeValidator(_text)]
Time = Annotated[Number, Field(gt=0, lt=1)]


class SamplesConfig(Section):
    """Images or videos that the model generates during training, or its EMA where strategy.ema keeps one. They have the
    size of the first of data.buckets."""

    captions: tuple[Caption, ...] = Field(min_length=1)
    """What is generated: captions, or of a model of classes their names or numbers."""
    images: tuple[Path, ...] = ()
    """Of models that begin with an image: one for all captions, or one for each. Of a video its first frame counts."""
    every: Count = 1000
    """Steps between two times; the last step has them too."""
    steps: Annotated[Count, Field(le=1000)] = 20
    """Steps of the objective's own sampler."""
    guidance: NotNegative = 3.0
    """The scale of classifier-free guidance; 1: none."""
    seed: Natural = 0
    """Number i is generated from seed + i."""


class ValidationConfig(Section):
    """The loss of samples that are not trained on, of the weights and of their EMA, always with the same noise."""

    samples: Count = 256
    """How many of those that the store has when the run begins, chosen by their place in it."""
    every: Count = 500
    """Steps between two times; the last step has one too."""
    times: tuple[Time, ...] = Field(default=(0.1, 0.3, 0.5, 0.7, 0.9), min_length=1)
    """Each t that samples are noised at, 0 = the image, 1 = noise. Metrics have the mean, and the loss of each."""

    @field_validator("times")
    @classmethod
    def _each_once(cls, times: tuple[float, ...]) -> tuple[float, ...]:
        if twice := sorted({time for time in times if times.count(time) > 1}):
            raise ValueError(f"{twice[0]:g} is there twice; each time has one loss")
        return times
