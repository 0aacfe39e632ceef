"""A run's YAML: its sections, each key with its meaning. Those of what is read and encoded are in data.py, those of
what is monitored in monitor.py, and how a step is run in Strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bigdit.config.data import DataConfig, EncodersConfig
from bigdit.config.monitor import SamplesConfig, TrackerName, ValidationConfig
from bigdit.numbers import Count, Natural, NotNegative, Positive
from bigdit.objective_spec import ObjectiveSpec
from bigdit.strategy import Section, Strategy


class ModelConfig(Section):
    """The model: `name`, `path`, or `class_name` with `kwargs`."""

    name: str | None = None
    """A model of `bigdit models`."""
    path: Path | None = None
    """A diffusers config.json, or the folder that holds one."""
    class_name: str | None = None
    """A transformer class of diffusers."""
    kwargs: dict[str, Any] = {}
    """The arguments of `class_name`."""
    init_from: Path | None = None
    """A folder of diffusers weights to start from, or a checkpoint. null: weights are drawn from train.seed."""


class TrainConfig(Section):
    """How long the run is, how its learning rate goes, and what it saves."""

    steps: Count | None = None
    """Optimizer steps."""
    epochs: Annotated[Positive, Field(le=10**6)] | None = None
    """In place of steps: how often each sample is trained on, without those of validation. The last step is full."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises to strategy.optimizer.lr."""
    lr_schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """The learning rate after the warm-up. cosine: half a cosine. wsd (warm-up, stable, decay): it falls in the last
    decay_steps, as one minus the root of what is done."""
    decay_steps: Count | None = None
    """Steps in which wsd lowers the learning rate."""
    min_lr: NotNegative = 0.0
    """The learning rate that cosine and wsd end at."""
    checkpoint_every: Count = 1000
    """Steps between checkpoints."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints stay."""
    keep_every: Count | None = None
    """Checkpoints of steps that this divides stay too."""
    export_every: Count | None = None
    """Steps between exports in diffusers' format, of the transformer or of the adapters; the last step has one too.
    `bigdit export` writes the whole pipeline."""
    snapshot_every: Count | None = None
    """Steps between snapshots of the averages of strategy.ema.widths, 4 bytes a trained weight and average. All stay,
    and averages of other widths are made of them."""
    grace: Positive = 60.0
    """Seconds after SIGTERM, SIGUSR1, SIGHUP or Ctrl-C to save a checkpoint and end in."""
    timeout: Positive = 600.0
    """Seconds that a process waits for another one before the run ends."""
    most_skipped_steps: Count = 10
    """Steps in a row that may be skipped since their gradients are not finite; then the run ends."""
    seed: Natural = 0
    """Of weights, order, noise, t and, in bf16_sr, of rounding."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.steps is None and self.epochs is None:
            raise ValueError("steps and epochs are both missing; set one of them")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps is {self.steps} and epochs {self.epochs:g}, and one follows from the other; leave one of them "
                "out, or set it to null"
            )
        return self

    @property
    def known_steps(self) -> int:
        """`steps`, which a run by epochs has when its samples were counted (train/resume.py)."""
        assert self.steps is not None, "its epochs were not counted"
        return self.steps


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    """What is trained."""
    data: DataConfig
    """Images or videos with captions or classes, and the folder of their latents and embeddings."""
    encoders: EncodersConfig
    """What makes latents and embeddings of them."""
    objective: ObjectiveSpec | None = None
    """What the model learns to predict. null: the model's own, DDPM of DiT and PixArt, flow matching of all others."""
    strategy: Strategy = Strategy()
    """How a step is run: engine, batch, precision, optimizer, memory. `bigdit plan --out` writes it."""
    train: TrainConfig
    """The length of the run, its learning rate, and what it saves."""
    validation: ValidationConfig | None = None
    """The loss of samples that are not trained on. null: all samples are trained on."""
    samples: SamplesConfig | None = None
    """Images or videos that are generated during training."""
    trackers: tuple[TrackerName, ...] = ()
    """What gets metrics and images too, by accelerate."""
    plan: Path | None = None
    """The plan.yaml of `bigdit plan --out`, or its folder, as seen from this file: predictions to compare the run with.
    null: nothing is compared."""
    stages: tuple[dict[str, Any], ...] = ()
    """Stages one after another, with the same weights, optimizer state and EMA. Each holds the keys that differ from
    the run's, such as data and train.steps."""
    output: Path
    """The folder of checkpoints, exports, images, metrics, the receipt and the run's page."""

    @model_validator(mode="after")
    def _features_somewhere(self) -> RunConfig:
        folder, features = self.data.features, self.strategy.features
        if features == "cached" and folder is None:
            raise ValueError("data.features is missing; name the folder that `bigdit extract` fills")
        if features == "online" and folder is not None:
            raise ValueError(f"data.features is {folder}, and strategy.features is online; leave data.features out")
        return self


METRICS = "metrics.jsonl"
"""A row a step."""

RECORD = "run.json"
"""The run as its last start has it, and what its first steps took."""

RECEIPT = "receipt.json"
"""Of a run that came to its end."""


def receipt_of(stage: int) -> str:
    """Of a stage that another one follows."""
    return f"receipt-stage-{stage}.json"


PAGE = "report.html"

CHECKPOINTS, AVERAGES, EXPORTS, SAMPLES = "checkpoints", "averages", "exports", "samples"
"""Folders; in each a name a step, such as step-00000800."""
