"""A run's YAML: its sections, each key with its meaning. Data and encoders are in data.py, the step in Strategy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from bigdit.config.data import DataConfig, EncodersConfig
from bigdit.documents import Count, Natural, NotNegative, Number, Positive
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
    """Weights to start from: a folder of diffusers, a checkpoint, or one safetensors file in the names of the original
    project or of ComfyUI. null: random weights from train.seed."""
    lora_from: Path | None = None
    """LoRA weights to start from, over init_from: a checkpoint or an export, or a safetensors file in the names of
    diffusers, ComfyUI or kohya's scripts. null: new ones."""


class TrainConfig(Section):
    """The length of the run, its learning rate, and what it saves."""

    steps: Count | None = None
    """Optimizer steps."""
    epochs: Annotated[Positive, Field(le=10**6)] | None = None
    """Instead of steps: passes over the samples, without validation samples. The last step is full."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises to strategy.optimizer.lr."""
    lr_schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """The learning rate after the warm-up. cosine: half a cosine. wsd (warm-up, stable, decay): it falls in the last
    decay_steps as 1 - √(share of them done)."""
    decay_steps: Count | None = None
    """Steps in which wsd lowers the learning rate."""
    min_lr: NotNegative = 0.0
    """The last learning rate of cosine and wsd."""
    checkpoint_every: Count = 1000
    """Steps between checkpoints."""
    keep_checkpoints: Count = 2
    """The number of newest checkpoints to keep."""
    keep_every: Count | None = None
    """Also keep checkpoints at multiples of this step."""
    export_every: Count | None = None
    """Steps between exports of the transformer or the adapters in diffusers' format; the last step has one too.
    `bigdit export` writes the whole pipeline."""
    snapshot_every: Count | None = None
    """Steps between snapshots of the EMAs of strategy.ema.widths: 4 bytes per trained weight and EMA. None is deleted.
    EMAs of other widths are computed from them."""
    grace: Positive = 60.0
    """Seconds to save a checkpoint and end after SIGTERM, SIGUSR1, SIGHUP or Ctrl-C."""
    timeout: Positive = 240.0
    """Seconds that a process waits for another before the run ends. From when all have come until the first step is
    done, and while checkpoints are written: at least 600."""
    compare_replicas_every: Count | None = 100
    """Steps between comparisons of the weights and optimizer state that several processes hold alike: ZeRO, HSDP. A
    process that differs is named, and the run ends. Each checkpoint is compared before it is saved. null: nothing
    is."""
    most_skipped_steps: Count = 10
    """The run ends after more skipped steps in a row than this. A step whose gradients are not finite is skipped."""
    seed: Natural = 0
    """The seed of weights, order, noise, t and, in bf16_sr, rounding."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.steps is None and self.epochs is None:
            raise ValueError("steps and epochs are both missing; set one of them")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps is {self.steps} and epochs {self.epochs:g}, and only one may be set; leave one of them out, or "
                "set it to null"
            )
        return self

    @property
    def known_steps(self) -> int:
        """`steps`; a run by epochs has it after its samples were counted (train/resume.py)."""
        assert self.steps is not None, "its epochs were not counted"
        return self.steps


TrackerName = Literal["tensorboard", "wandb", "trackio", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab"]
"""As accelerate calls them, and as their packages are called."""


def _text(value: Any) -> Any:
    """The number of a class as a text, as YAML has it without quotes; pydantic judges the rest."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


CaptionText = Annotated[str, BeforeValidator(_text)]
Time = Annotated[Number, Field(gt=0, lt=1)]


class SamplesConfig(Section):
    """Images or videos that the model, or its EMA, generates during training, in the size of the first of
    data.buckets."""

    captions: tuple[CaptionText, ...] = Field(min_length=1)
    """Captions to generate from; for a class-conditional model, names or numbers of classes."""
    images: tuple[Path, ...] = ()
    """First frames for image-to-video models, images to edit for edit models, or images with x.mask.png beside them for
    fill models: one for all captions, or one for each. Of a video, the first frame is used."""
    every: Count = 1000
    """Steps between generations; the last step has one too."""
    steps: Annotated[Count, Field(le=1000)] = 20
    """Steps of the objective's own sampler."""
    guidance: NotNegative = 3.0
    """The scale of classifier-free guidance; 1: none."""
    seed: Natural = 0
    """Image i is generated from seed + i."""


class ValidationConfig(Section):
    """The loss on samples that are not trained on, with the weights and with their EMA, always with the same noise."""

    samples: Count = 256
    """The number of validation samples, chosen by their position in the cache when the run starts."""
    every: Count = 500
    """Steps between validations; the last step has one too."""
    times: tuple[Time, ...] = Field(default=(0.1, 0.3, 0.5, 0.7, 0.9), min_length=1)
    """The values of t: 0 is the image, 1 is noise. Metrics have the mean loss, and the loss at each t.

    With objective.t_range they are shares of the way from its first bound to its second."""

    @field_validator("times")
    @classmethod
    def _each_once(cls, times: tuple[float, ...]) -> tuple[float, ...]:
        if twice := sorted({time for time in times if times.count(time) > 1}):
            raise ValueError(f"{twice[0]:g} is there twice; each time has one loss")
        return times


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """Images or videos with captions or classes, and their latent and embedding cache."""
    encoders: EncodersConfig
    """The encoders that make latents and embeddings."""
    objective: ObjectiveSpec | None = None
    """What the model learns to predict. null: the model's own, DDPM for DiT and PixArt, flow matching for most
    others."""
    strategy: Strategy = Strategy()
    """How a step is run: engine, batch, precision, optimizer, memory. `bigdit plan --out` writes it."""
    train: TrainConfig
    """The length of the run, its learning rate, and what it saves."""
    validation: ValidationConfig | None = None
    """The loss on samples that are not trained on. null: the run trains on all samples."""
    samples: SamplesConfig | None = None
    """Images or videos that are generated during training."""
    trackers: tuple[TrackerName, ...] = ()
    """Trackers of accelerate that also receive metrics and images."""
    plan: Path | None = None
    """The plan.yaml of `bigdit plan --out`, or its folder, relative to this file. The run is compared with its
    predictions. null: nothing is compared."""
    stages: tuple[dict[str, Any], ...] = ()
    """Successive stages with the same weights, optimizer state and EMA. Each has the keys that differ from the run's,
    such as data and train.steps."""
    output: Path
    """The folder of checkpoints, exports, images, metrics, the receipt and the run's page."""

    @model_validator(mode="after")
    def _features_somewhere(self) -> RunConfig:
        folder, features = self.data.features, self.strategy.features
        if features == "cached" and folder is None:
            raise ValueError("data.features is missing; name the folder that `bigdit extract` fills")
        if features == "online" and folder is not None:
            raise ValueError(f"data.features is {folder}, and strategy.features is online; leave data.features out")
        sources = {os.path.normpath(each.path) for each in self.data.images}
        for key, written in (("data.features", folder), ("output", self.output)):
            if written is not None and os.path.normpath(written) in sources:
                raise ValueError(f"{key} is {written}, which data.images names too; name a folder of its own")
        return self


METRICS = "metrics.jsonl"
"""A row for each step."""

RECORD = "run.json"
"""The run of the last start, and the memory of its first steps."""

RECEIPT = "receipt.json"
"""Written at the end of a run."""


def receipt_of(stage: int) -> str:
    """The receipt of a stage that another follows."""
    return f"receipt-stage-{stage}.json"


PAGE = "report.html"

CHECKPOINTS, EMA_SNAPSHOTS, EXPORTS, SAMPLES = "checkpoints", "ema_snapshots", "exports", "samples"
"""Folders, with an entry for each step, such as step-00000800."""
