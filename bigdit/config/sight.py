"""The sections of a run's YAML that say what is seen of its training. What each key means is said here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from bigdit.numbers import Count, Natural, NotNegative, Number
from bigdit.spec import Strict

TrackerName = Literal["tensorboard", "wandb", "trackio", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab"]
"""As accelerate calls them, and as their packages are called."""


def _text(value: Any) -> Any:
    """The number of a class as a text, as YAML has it without quotes; pydantic judges the rest."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Caption = Annotated[str, BeforeValidator(_text)]
Time = Annotated[Number, Field(gt=0, lt=1)]


class SamplesConfig(Strict):
    """Pictures, or videos, of `captions` (of a model of classes their names or numbers), drawn `every` so many steps,
    and after the last, by the model that trains, or by its average where train.ema keeps one: of the size of the first
    of data.buckets, by `steps` of the objective's own sampler, with classifier-free `guidance` (1: none). Number i is
    drawn from `seed` + i. Videos of models that begin with a picture begin with `images`, or with the first frames of
    those that are videos: one for all captions, or one for each.
    """

    captions: tuple[Caption, ...] = Field(min_length=1)
    images: tuple[Path, ...] = ()
    every: Count = 1000
    steps: Annotated[Count, Field(le=1000)] = 20
    guidance: NotNegative = 3.0
    seed: Natural = 0


class ValidationConfig(Strict):
    """The loss of samples that are held out: `samples` of those that the store has when the run begins, chosen by where
    they lie in it, are never trained on. `every` so many steps, and after the last, each of them is noised at all
    `times` (0 = the picture, 1 = noise), always with the same noise, and the loss of the weights, and of their average
    where train.ema keeps one, is written to the metrics: the mean, and that of each time.
    """

    samples: Count = 256
    every: Count = 500
    times: tuple[Time, ...] = Field(default=(0.1, 0.3, 0.5, 0.7, 0.9), min_length=1)

    @field_validator("times")
    @classmethod
    def _each_once(cls, times: tuple[float, ...]) -> tuple[float, ...]:
        if twice := sorted({time for time in times if times.count(time) > 1}):
            raise ValueError(f"{twice[0]:g} is there twice; each time has one loss")
        return times
